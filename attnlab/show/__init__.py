"""How results look: sheets, plots and panels."""
