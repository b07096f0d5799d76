// A picture that shows the value at the pointer, reports clicks and arrow keys, and shows a mark.
const MARGIN = 3; // CSS pixels between a selected cell and its mark

function text(cells, u, v) {
  const [left, top, right, bottom] = cells.place;
  const [x0, x1, y0, y1] = cells.range;
  const across = (u - left) / (right - left), down = (v - top) / (bottom - top);
  if (across < 0 || across >= 1 || down < 0 || down >= 1) return "";
  const column = Math.round(x0 + across * (x1 - x0));
  const row = cells.rows.length === 1 ? 0 : Math.round(y0 + down * (y1 - y0));
  if (cells.columns[column] === undefined || cells.rows[row] === undefined) return "";
  const bytes = cells.values;
  const value = bytes.getFloat32(4 * (row * cells.columns.length + column), true);
  const shown = cells.names.length ? cells.names[value]
    : value === -Infinity ? "not run"
    : `${cells.unit} ${Number.isNaN(value) ? "NaN" : value.toPrecision(3)}`;
  return [cells.rows[row], cells.columns[column], shown].filter((part) => part).join("\n");
}

function render({ model, el }) {
  const box = document.createElement("div");
  const frame = document.createElement("div");
  const image = document.createElement("img");
  const mark = document.createElement("div");
  const hover = document.createElement("div");
  box.className = "attnlab-picture";
  frame.className = "attnlab-frame";
  mark.className = "attnlab-mark";
  hover.className = "attnlab-hover";
  image.tabIndex = 0;
  frame.append(image, mark);
  box.append(frame, hover);
  el.append(box);

  let url = null;
  const showImage = () => {
    const png = model.get("png");
    box.style.display = png.byteLength ? "" : "none";
    if (!png.byteLength) return;
    const old = url;
    url = URL.createObjectURL(new Blob([png], { type: "image/png" }));
    image.onload = () => old && URL.revokeObjectURL(old);
    image.src = url;
    image.width = model.get("width");
    image.dataset.version = model.get("version");
  };
  const showRest = () => {
    const [left, top, width, height] = model.get("mark");
    mark.style.display = width ? "block" : "none";
    Object.assign(mark.style, {
      left: `calc(${100 * left}% - ${MARGIN}px)`, top: `calc(${100 * top}% - ${MARGIN}px)`,
      width: `calc(${100 * width}% + ${2 * MARGIN}px)`,
      height: `calc(${100 * height}% + ${2 * MARGIN}px)`,
    });
    image.alt = model.get("alt");
    image.setAttribute("aria-description", model.get("hint"));
    box.classList.toggle("attnlab-stale", model.get("stale"));
  };
  const point = (event) => {
    const { left, top, width, height } = image.getBoundingClientRect();
    return [(event.clientX - left) / width, (event.clientY - top) / height];
  };
  const click = (event) => model.send({ click: point(event) });
  const move = (event) => {
    const [u, v] = point(event), cells = model.get("cells");
    const shown = cells.rows && !model.get("stale") ? text(cells, u, v) : "";
    hover.textContent = shown || model.get("hint");
    hover.style.display = hover.textContent ? "block" : "none";
    Object.assign(hover.style, u < 0.5
      ? { left: `calc(${100 * u}% + 14px)`, right: "" }
      : { left: "", right: `calc(${100 - 100 * u}% + 14px)` });
    hover.style.top = `${100 * v}%`;
  };
  const leave = () => { hover.style.display = "none"; };
  const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const press = (event) => {
    if (!(event.key in STEPS)) return;
    event.preventDefault();
    event.stopPropagation();
    model.send({ step: STEPS[event.key] });
  };
  const reportTheme = () => {
    const dark = document.body.dataset.jpThemeLight === "false";
    if (dark === model.get("dark")) return;
    model.set("dark", dark);
    model.save_changes();
  };
  const theme = new MutationObserver(reportTheme);
  theme.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light"] });
  image.addEventListener("click", click);
  image.addEventListener("mousemove", move);
  image.addEventListener("mouseleave", leave);
  image.addEventListener("keydown", press);
  model.on("change:version", showImage);
  model.on("change:mark change:alt change:hint change:stale", showRest);
  showImage();
  showRest();
  reportTheme();
  return () => {
    theme.disconnect();
    if (url) URL.revokeObjectURL(url);
  };
}
export default { render };
