"""Command: the name, the help and the function of one command."""

import argparse
import dataclasses
import json
import os
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnlab.case.case import Case
from attnlab.case.declaration import FIELDS
from attnlab.case.errors import InvalidCase
from attnlab.case.fields import (
    check_plugin_file,
    difference,
    is_plugin,
    names_file,
    package_of_backend,
    refuse,
    split_mapping,
)
from attnlab.case.flags import add_case_flags, add_field_flags, case_of, flag
from attnlab.case.ops import OPS
from attnlab.case.output_file import HTML, check_output_file, write_text
from attnlab.case.platforms import machine_platform
from attnlab.case.shown import Shown, json_value
from attnlab.library.op import libraries

if TYPE_CHECKING:
    from rich.console import Console

    from attnlab.kernels.backend import Backend
    from attnlab.kernels.vllm.source import Source
    from attnlab.lab.lab import Lab

# Of the command line.
TABLE = tomllib.loads((files(__package__) / "commands.toml").read_text(encoding="utf-8"))
BAD_INPUT = "2 bad input"
MOST_FLAGS = 10
_MOST_NOTES = 6  # lines; --help-all shows longer ones, such as what --json prints


class _Help(argparse.Action):
    """--help, which hides flags that few people use, and --help-all."""

    def __init__(
        self, option_strings: list[str], dest: str, *, used: tuple[str, ...], **given: Any
    ) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, **given)
        self.used = used

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        flags = [
            one for one in parser._actions if one.option_strings and not isinstance(one, _Help)
        ]
        shown = flags
        if self.used and len(flags) > MOST_FLAGS + 2:
            by_name = {name: one for one in flags for name in one.option_strings}
            shown = [by_name[name] for name in self.used if name in by_name][:MOST_FLAGS]
        for one in flags:
            if one not in shown:
                one.help = argparse.SUPPRESS
        if self.used and (parser.epilog or "").count("\n") > _MOST_NOTES:
            parser.epilog = None
        parser.print_help()
        if len(shown) < len(flags):
            print(f"\n{parser.prog} --help-all shows {len(flags) - len(shown)} more flags")
        parser.exit()


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of the command line.

    - ``purpose``: one sentence; ``examples``: command lines; ``exit_codes``: all but 2, as
      "0 …; 1 …"; ``arguments``: the positional ones, for the usage line; ``notes``: the end of the help.
    - ``add_flags`` adds the command's flags; ``run`` runs it and returns the exit code. ``used``: those
      that --help shows first.
    """

    name: str
    purpose: str
    examples: tuple[str, ...]
    exit_codes: str
    run: Callable[[argparse.Namespace], int]
    add_flags: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    arguments: str = ""
    notes: str = ""
    used: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        """Return the beginning of the help: purpose, examples and exit codes."""
        examples = "\n".join(f"  {example}" for example in self.examples)
        codes = f"{self.exit_codes}; {BAD_INPUT}"
        return f"{self.purpose}\n\nexamples:\n{examples}\n\nexit codes: {codes}"

    def add_to(self, commands: Any) -> None:
        """Add the command to the subparsers of the command line."""
        parser: argparse.ArgumentParser = commands.add_parser(
            self.name,
            help=self.purpose[0].lower() + self.purpose[1:].rstrip("."),
            usage=f"attnlab {self.name} [OPTIONS] {self.arguments}".rstrip(),
            description=self.description,
            epilog=self.notes.strip() or None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=False,
        )
        used = ("--json", *self.used, *TABLE["used"])
        parser.add_argument(
            "-h", "--help", action=_Help, used=used, help="show the flags that people use"
        )
        parser.add_argument("--help-all", action=_Help, used=(), help="show every flag")
        parser.add_argument(
            "--json",
            action="store_true",
            help="print one JSON document on standard output instead of text",
        )
        self.add_flags(parser)
        parser.set_defaults(command=self.run)


COMMANDS: dict[str, Command] = {}  # in the order in which their functions are defined
Run = Callable[[argparse.Namespace], int]


def runs(
    name: str, fields: "Mapping[str, dataclasses.Field[Any]]" = FIELDS
) -> Callable[[Run], Run]:
    """Let a function run the command that commands.toml describes; ``fields``: those of "@fields" there."""
    table = {**TABLE[name]}
    groups = table.pop("flags", {})
    codes = table.pop("exit_codes").format(**TABLE["codes"])

    def register(run: Run) -> Run:
        COMMANDS[name] = Command(
            name=name,
            run=run,
            exit_codes=codes,
            add_flags=lambda parser: _add_groups(parser, groups, fields),
            **table,
        )
        return run

    return register


def _add_groups(
    parser: argparse.ArgumentParser,
    groups: Mapping[str, Mapping[str, Any]],
    fields: Mapping[str, "dataclasses.Field[Any]"],
) -> None:
    """Add the flags of a command, group by group."""
    for title, entries in groups.items():
        if title == "@case":
            add_case_flags(parser)
        elif title == "@fields":
            add_field_flags(parser, fields)
        elif title == "@one_of":
            _add_entries(parser.add_mutually_exclusive_group(), entries)
        else:
            is_group = title and not title.startswith("@")
            _add_entries(parser.add_argument_group(title) if is_group else parser, entries)


def _add_entries(group: Any, entries: Mapping[str, Any], text: str = "") -> None:
    """Add the flags of a table to a group; ``text`` stands for "{}" in their help."""
    for spec, given in entries.items():
        name = spec.removeprefix("@")
        if name in TABLE["shared"] and name != spec:
            _add_entries(group, TABLE["shared"][name], given)
        elif name == "library":
            flag(group, "--library", given, choices=libraries(), default="vllm")
        elif name != spec:
            adders: dict[str, Callable[..., None]] = {"kernel": _add_kernel, "map": _add_map}
            adders[name](group, **given)
        else:
            options = {"help": given} if isinstance(given, str) else {**given}
            flag(group, spec, options.pop("help").replace("{}", text), **options)


def errors() -> "Console":
    """Return the console of standard error."""
    return _console(stderr=True, soft_wrap=True)


def _console(**options: Any) -> "Console":
    """Return a console that raises if its pipe is closed; rich would end the process with exit code 1."""
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            raise

    return Output(highlight=False, **options)


def print_json(document: Any) -> None:
    """Print one strict JSON document on standard output."""
    print(json.dumps(json_value(document), indent=2, allow_nan=False))


def show(noun: Shown, note: str = "") -> None:
    """Print a noun's sheet on standard output, complete; 110 columns wide unless a terminal says."""
    from attnlab.show.sheets import WIDTH, sheet_of, text

    if note:
        noun = sheet_of(noun).noted(note)
    fixed = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    console = _console(width=WIDTH if fixed else None)
    console.print(text(noun, complete=True), crop=False)


def put(noun: Any, as_json: bool, note: str = "", **more: Any) -> None:
    """Print a noun: its sheet with ``note``, or the document of its ``to_dict`` with ``more``."""
    if as_json:
        print_json({**noun.to_dict(), **more})
    else:
        show(noun, note)


def notice(text: str) -> None:
    """Print one line on standard error."""
    print(f"attnlab: {text}", file=sys.stderr)


@contextmanager
def progress(text: str) -> Iterator[Callable[..., None]]:
    """Show the current step, and the time since it began, on standard error if that is a terminal.

    Yields a function of (step, done, total); with ``done`` and ``total`` there is a bar, and the time left.
    Lines of ``step`` before its last stand above it until others take their place.
    """
    from rich.console import RenderableType
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Steps(Progress):
        above = ""

        def get_renderables(self) -> Iterator[RenderableType]:
            if self.above:
                yield Text(self.above)
            yield from super().get_renderables()

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
    )
    console = errors()
    own = os.getpid()
    with Steps(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(text, total=None)

        def update(
            step: str | None = None, done: int | None = None, total: int | None = None
        ) -> None:
            if os.getpid() != own:  # in a copy, the lock of the bar may be held for ever
                return
            if total not in (None, bar.tasks[0].total):  # another count: the speed begins anew
                bar.reset(task, total=total)
            *above, last = (step or text).split("\n")
            bar.above = "\n".join(above)
            bar.update(task, description=last, completed=done)

        yield update


def check_share_flags(args: argparse.Namespace) -> None:
    """Raise InvalidCase for a file that cannot be written, before anything runs."""
    if args.html is not None:
        check_output_file(args.html, "html", HTML)
    if args.markdown is not None:
        check_output_file(args.markdown, "markdown")
    args.notes = read_notes(args.note)


def is_shared(args: argparse.Namespace) -> bool:
    """Answer whether there is a page or a comment to write."""
    return args.html is not None or args.markdown is not None


def share(
    args: argparse.Namespace,
    noun: Shown,
    *,
    draw: Callable[[Any], Sequence[Any]] = lambda pages: (),
    **facts: Any,
) -> None:
    """Write the files of --html and --markdown; ``facts`` are those of ``page_of``.

    ``draw``: returns the pictures of a page, which a comment does not have, from the module of pages.
    """
    if not is_shared(args):
        return
    from attnlab.reports import shared_page

    pictures = () if args.html is None else draw(shared_page)
    command = _without_files(sys.argv[1:])
    page = shared_page.page_of(noun, command, pictures=pictures, **facts)
    page = page.with_notes(args.notes, args.html)
    if args.html is not None:
        page.write(args.html)
    if args.markdown is not None:
        write_text(args.markdown, page.markdown())


NOTES = ("since", "fix", "owner", "status")


def read_notes(words: Sequence[str]) -> dict[str, str]:
    """Return the notes of NAME=TEXT words and of TOML files. Raises InvalidCase for another name or value."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if equals:
            found[name] = text
            continue
        try:
            found |= tomllib.loads(Path(word).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidCase(
                f"note must be NAME=TEXT or a TOML file, got {word!r}: {error}"
            ) from error
    for name, text in found.items():
        if name not in NOTES or not isinstance(text, str):
            allowed = ", ".join(NOTES)
            raise InvalidCase(f"note must be a text of {allowed}, got {name}={text!r}")
    return found


def _without_files(argv: Sequence[str]) -> str:
    """Return a command line without --html, --markdown and --note."""
    words, kept = iter(argv), ["attnlab"]
    for word in words:
        flag, equals, _ = word.partition("=")
        if flag not in ("--html", "--markdown", "--note"):
            kept.append(word)
        elif not equals:
            next(words, None)
    return shlex.join(kept)


def case_of_flags(args: argparse.Namespace) -> Case:
    """Return the Case of the flags. If no flag names the op of a user's kernel, it is the kernel's own."""
    is_call = getattr(args, "call", None) is not None
    from_scratch = not (args.test_id or args.case or args.field_op or is_call)
    if args.field_backend is not None and is_plugin(args.field_backend) and from_scratch:
        if names_file(args.field_backend):
            check_plugin_file(args.field_backend)
        from attnlab.kernels import find_backend

        backend = find_backend(args.field_backend, getattr(args, "source", None))
        notice_binding(backend)
        args.field_op = backend.ops[0]
    return with_platform(args, case_of(args))[0]


def with_platform(args: argparse.Namespace, case: Case) -> tuple[Case, str]:
    """Return the Case with the platform that was given, else of the machine's GPU, else the default; and
    which of them it is. ``args.assumed`` is the note of an assumed platform, or ""."""
    args.assumed = ""
    if args.field_platform is not None or args.case is not None:
        return case, "case"
    platform, allowed = machine_platform(), case.spec.platforms
    if platform is None or (allowed is not None and platform not in allowed):
        args.assumed = f"platform {case.platform} is assumed"
        return case, "assumed"
    return case.replace(platform=platform), "machine"


class _KernelOrCall(argparse.Action):
    """A kernel, once; also the file of a call, a name with a suffix and without a colon, if ``has_call``."""

    def __init__(self, *args: Any, has_call: bool = False, **given: Any) -> None:
        super().__init__(*args, **given)
        self.has_call = has_call

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, value: Any, option: str | None = None
    ) -> None:
        is_call = self.has_call and ":" not in value and bool(Path(value).suffix)
        if not is_call and getattr(namespace, "kernel", None) is not None:
            raise argparse.ArgumentError(self, f"not allowed twice, got {value!r}")
        setattr(namespace, "call" if is_call else "kernel", Path(value) if is_call else value)


def _add_kernel(group: Any, *, has_call: bool = True, is_positional: bool = True) -> None:
    """Add --kernel, and the same without --kernel; ``has_call``: to a command that has --call, too."""
    of_call = (
        "; of a call also origin: the installed op that the call names, whose module is imported"
        if has_call
        else ""
    )
    text = "your kernel, FILE.py:FUNCTION or MODULE:FUNCTION; the same as --backend"
    group.add_argument("--kernel", metavar="NAME", action=_KernelOrCall, help=text + of_call)
    if is_positional:
        group.add_argument(
            "kernel",
            nargs="?",
            metavar="KERNEL|CALL" if has_call else "KERNEL",
            action=_KernelOrCall,
            has_call=has_call,
            default=argparse.SUPPRESS,
            help="as --kernel" + "; or a file, as --call" * has_call,
        )


def _add_map(
    group: Any,
    *,
    has_call: bool = False,
    op: str = "field_op",
    backend: str = "field_backend",
    call_op: str = "call_op",
) -> None:
    """Add --map to a command that takes an op without a record.

    ``has_call``: the command reads calls in other formats, whose names --map also states. Attributes of the
    flags: ``op`` names the op, ``backend`` what runs it, and ``call_op`` then the op that describes a call.
    """
    group.set_defaults(foreign_op=(op, backend, call_op), call_op=None, maps_call=has_call)
    of_call = (
        "; without such an op, FIELD=KEY,…: the key of each field in a dict of tensors, for example "
        "query=q,key_cache=k; numbers are values"
    )
    group.add_argument(
        "--map",
        action="append",
        metavar="NAME=EXPRESSION",
        help="with --op MODULE:FUNCTION: the value of a parameter whose name no record has, as in the record "
        f"of an op; repeatable{of_call if has_call else ''}",
    )


def read_map(args: argparse.Namespace) -> dict[str, str] | None:
    """Return the key of each field of --map, or None without it. Raises InvalidCall."""
    from attnlab.recorder.dumps import parse_names

    return None if args.map is None else parse_names(",".join(args.map))


def take_foreign_op(args: argparse.Namespace) -> None:
    """Let --op MODULE:FUNCTION, an op that no record knows, name the backend of a command with --map.

    With --source FILE.py, or a folder that has MODULE.py, it is a function of that file. Raises InvalidCase
    for a wrong --map.
    """
    if not hasattr(args, "foreign_op"):
        return
    key, place, call_op = args.foreign_op
    given = getattr(args, key) or []
    ops = given if isinstance(given, list) else [given]
    if not any(":" in op for op in ops):
        if args.map is not None and not (args.maps_call and args.call):
            of_call = " or with a call" if args.maps_call else ""
            raise InvalidCase(f"map must be given with op MODULE:FUNCTION{of_call}")
        return
    if len(ops) > 1:
        raise InvalidCase("op MODULE:FUNCTION must be the only op", field="op")
    setattr(args, key, None)
    module, _, function = ops[0].partition(":")
    several = isinstance(args.source, list)
    source = next(iter(args.source), None) if several else args.source
    file = None if not source else Path(source).expanduser()
    if file is not None and file.is_dir() and "." not in module:
        file /= f"{module}.py"
    if file is not None and file.suffix == ".py" and file.is_file():
        if file.stem != module:
            refuse("op", f"{file.stem}:FUNCTION with source {file}", ops[0])
        module, args.source = str(file), [] if several else None
    backend, args.map = f"{module}:{function}({', '.join(args.map or ())})", None
    if not is_plugin(backend):
        refuse("op", "an op, or PACKAGE.MODULE:FUNCTION", ops[0])
    setattr(args, place, [backend] if isinstance(getattr(args, place), list) else backend)
    if getattr(args, "call", None) is not None:
        from attnlab.kernels import find_backend

        setattr(args, call_op, find_backend(backend, source).ops[0])


def case_with_runner(args: argparse.Namespace) -> Case:
    """Return the Case of the flags of a command with --kernel; --source alone runs a call."""
    if args.kernel is not None:
        if args.field_backend is not None:
            raise InvalidCase("kernel and backend must not both be given", field="kernel")
        is_origin = getattr(args, "call", None) is not None and args.kernel == "origin"
        args.field_backend = None if is_origin else args.kernel
    return case_with_source(args)


def case_with_source(args: argparse.Namespace) -> Case:
    """Return the Case of the flags; --source alone selects backend vllm, or for a call that of the library
    that the source has.

    Raises InvalidCase if --source is given but not used.
    """
    case = case_of_flags(args)
    backend = case.backend
    if args.source is not None and args.field_backend is None and backend == "model":
        from attnlab.kernels.runner import backend_in

        backend = "vllm" if getattr(args, "call", None) is None else backend_in(str(args.source))
        case = case.replace(backend="vllm") if backend == "vllm" else case
    args.field_backend = backend if args.source is not None else args.field_backend
    package = package_of_backend(backend)
    if args.source is not None and package is None:
        raise InvalidCase(
            f"source must not be given with backend {case.backend}; add --backend vllm, rocm or cuda"
        )
    if args.source is not None and package is not None:
        from attnlab.kernels.vllm.source import find_source, source_path

        args.source = source_path(str(args.source), package)
        find_source(args.source, package)
    return case


def notice_rules(source: "Source") -> None:
    """Print one line if a release differs in a known way from the rules that are used for it."""
    if text := difference(source.version):
        notice(f"vLLM {source.version} is run with the rules of {source.rules}{text}")


def notice_binding(backend: "Backend") -> None:
    """Print how the arguments of an op without a record are bound."""
    if split_mapping(backend.name)[1] is not None:
        op = OPS[backend.ops[0]]
        bound = ", ".join(f"{name}={text}" for name, text in op.arguments.items())
        notice(f"{op.summary}: {bound}")


def lab_of(args: argparse.Namespace, on_step: Callable[..., None]) -> "Lab":
    """Return a Lab with the source and the device of the flags."""
    from attnlab.lab.lab import Lab

    package = package_of_backend(args.field_backend or "vllm")
    is_vllm = package is not None and package.name == "vllm"
    if args.source is not None and is_vllm:
        from attnlab.kernels.vllm.source import find_source

        notice_rules(find_source(args.source))
    return Lab(source=args.source, device=args.device, on_step=on_step)
