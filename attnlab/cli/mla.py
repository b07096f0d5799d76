"""The command ``attnlab mla``."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from attnlab.case.errors import InvalidCase
from attnlab.case.fields import refuse
from attnlab.case.ops import RELEASES
from attnlab.cli.command import Command
from attnlab.cli.output import print_json, progress, show
from attnlab.mla.mla_case import MlaCase

_FIELDS = {one.name: one for one in dataclasses.fields(MlaCase)}
_BOOLS = {"true": True, "false": False}
_HELP = {
    "path": "prefill, decode or shards (context parallelism)",
    "num_heads": "query heads",
    "kv_lora_rank": "elements of a latent from which keys and values are computed",
    "qk_rope_head_dim": "elements of a latent that the keys of all heads share",
    "qk_nope_head_dim": "elements of a head's key that come from the latent",
    "v_head_dim": "elements of a head's value",
    "block_size": "tokens per cache block",
    "query_lens": "new tokens of each sequence",
    "ctx_lens": "cached tokens of each sequence",
    "chunk_rows": "tokens of context that are attended at once (prefill)",
    "chunking": "packed: several requests in one chunk; aligned: the same positions of all (prefill)",
    "empty_lse": "log-sum-exp of a row without keys: -inf or inf (prefill)",
    "partials": "exact: partial attentions are exact up to their dtype; op: those of decode_attention_fwd",
    "output_scale": "the last merge writes FP8, divided by this (prefill)",
    "tokens_with_context": "the last merge is given the number of tokens with context (prefill)",
    "num_ranks": "ranks that share the context (shards)",
    "interleave_size": "tokens in a run of one rank (shards)",
    "lse_dtype": "float32, or query for the dtype of the query (shards)",
    "padding": "rows of length 0 after the last sequence (decode)",
    "num_splits": "splits of the decode op (decode, shards)",
    "dtype": "float16, bfloat16 or float32",
    "kv_cache_dtype": "auto: the dtype of the query; fp8",
    "k_scale": "scale of an FP8 cache",
    "spread": "standard deviation of the query; larger scores make the parts differ more",
    "seed": "seed of the data",
    "release": "the release of vLLM whose chain is followed",
    "platform": "the platform that is modelled",
}


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend", default="model", help="model (default), or vllm: vLLM's Triton ops"
    )
    parser.add_argument(
        "--source", type=Path, metavar="PATH", help="a wheel, an sdist or a checkout of vLLM"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where backend vllm runs")
    parser.add_argument("--fault", metavar="NAME", help="plant a fault; --faults lists them")
    parser.add_argument("--faults", action="store_true", help="list the faults that have a name")
    parser.add_argument("--hostile", action="store_true", help="run all hostile cases of --release")
    group = parser.add_argument_group("fields of the case")
    for name, one in _FIELDS.items():
        text = (
            ",".join(map(str, one.default)) if isinstance(one.default, tuple) else str(one.default)
        )
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(
            flag,
            dest=f"field_{name}",
            metavar=_metavar(one.default),
            help=f"{_HELP[name]} (default: {text})",
        )


def _metavar(default: Any) -> str:
    """Return the form of a field's value, for the help text."""
    if isinstance(default, bool):
        return "BOOL"
    if isinstance(default, tuple):
        return "N,…"
    return "WORD" if isinstance(default, str) else "N" if isinstance(default, int) else "X"


def _run(args: argparse.Namespace) -> int:
    from attnlab.mla.faults import MLA_FAULTS
    from attnlab.mla.public import check_mla, run_mla

    given = {name: getattr(args, f"field_{name}") for name in _FIELDS}
    fields = {name: _value(name, text) for name, text in given.items() if text is not None}
    if args.faults:
        faults = {
            name: {"text": one.text, "paths": list(one.paths), "reported_in": list(one.seen_in)}
            for name, one in MLA_FAULTS.items()
        }
        return _list_faults(faults, args.json)
    where: dict[str, Any] = {"backend": args.backend, "source": args.source, "device": args.device}
    if args.hostile:
        if args.fault is not None or set(fields) - {"release"}:
            raise InvalidCase("hostile takes no fault and no field but release", field="hostile")
        release = fields.get("release", RELEASES[-1])
        if release not in RELEASES:
            refuse("release", f"one of {', '.join(RELEASES)}", release)
        with progress("hostile cases of MLA") as on_step:
            report = check_mla(
                release,
                **where,
                on_case=lambda done, total: on_step("hostile cases of MLA", done, total),
            )
        print_json(report.to_dict()) if args.json else show(report)
        return 1 if report.findings else 3 if report.unavailable else 0
    result = run_mla(MlaCase(**fields), **where, fault=args.fault)
    print_json(result.to_dict()) if args.json else show(result)
    return 0 if result.status == "match" else 1


def _value(name: str, text: str) -> Any:
    """Return the value of a field from its text; raise InvalidCase if it has another form."""
    default = _FIELDS[name].default
    if isinstance(default, tuple):
        return tuple(_number(name, one, int) for one in text.split(",")) if text else ()
    if isinstance(default, bool):
        if text.lower() not in _BOOLS:
            refuse(name, "true or false", text)
        return _BOOLS[text.lower()]
    if default is None and text.lower() == "none":
        return None
    if isinstance(default, int):
        return _number(name, text, int)
    return text if isinstance(default, str) else _number(name, text, float)


def _number(name: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        refuse(name, "an integer" if kind is int else "a number", text)


def _list_faults(faults: dict[str, dict[str, Any]], as_json: bool) -> int:
    if as_json:
        print_json(faults)
        return 0
    from attnlab.cli.catalogue_sheet import list_sheet

    show(list_sheet("fault", faults, ("text", "paths")))
    return 0


COMMAND = Command(
    name="mla",
    purpose="Run a path of MLA attention step by step, and name the fault that explains a wrong output.",
    examples=(
        "attnlab mla --query-lens 5,3 --ctx-lens 70,0",
        "attnlab mla --path decode --query-lens 3,3 --ctx-lens 40,9 --fault rows_share_length",
        "attnlab mla --hostile --backend vllm --source vllm-0.33.0.whl",
    ),
    exit_codes="0 every output is within its bound; 1 one is not; 3 none is wrong, but a case could not run",
    add_flags=_add_flags,
    run=_run,
)
