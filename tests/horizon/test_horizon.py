"""Horizons of kernels of our own: the size is known by arithmetic, and sound kernels are silent."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnlab.case.errors import InvalidCase, Unavailable
from attnlab.horizon.deployment import PRESETS, Deployment, read_deployment
from attnlab.horizon.launch import Launch, evaluate, load_kernels, read_launches
from attnlab.horizon.machine import running
from attnlab.horizon.survey import (
    LAUNCHES,
    KernelHorizon,
    Search,
    assumed_launches,
    kernel_horizon,
    survey,
)

FILE = Path(__file__).parent / "kernels.py"
WIDTH = 4096
LIMIT = 1 << 31
FIRST = LIMIT // WIDTH  # the first row whose offset is 2^31

X = f"float16[rows, {WIDTH}]"
ROWS: dict[str, Any] = {"x": X, "stride": "x.stride(0)", "WIDTH": 16}
TABLE = "int32[4] = rows - 1"
# Arguments beyond ROWS, the grid, and the rows from which an access is wrong; None: silent.
CASES: dict[str, tuple[dict[str, Any], str, int | None]] = {
    "row_product": ({}, "rows", FIRST + 1),
    "row_wide": ({}, "rows", None),
    "row_sum": ({}, "rows", FIRST + 1),
    "page": ({"table": TABLE}, "4", FIRST + 1),
    "page_wide": ({"table": TABLE}, "4", None),
    "masked_tail": ({"rows": "rows", "BLOCK": 64}, "cdiv(rows, 64)", FIRST + 1),
    "masked_out": ({"rows": "rows", "limit": 32, "BLOCK": 64}, "cdiv(rows, 64)", None),
    "carried": ({"step": WIDTH, "count": "rows"}, "1", FIRST + 1),
    "carried_pointer": ({"step": WIDTH, "count": "rows"}, "1", None),
    "loop_variable": ({"count": "rows"}, "1", FIRST + 1),
    "unused": ({}, "rows", None),
    "cancelled": ({}, "rows", FIRST + 1),
    "called": ({}, "rows", FIRST + 1),
    "block_base": ({"rows": "rows"}, "rows", FIRST + 1),
    "block_offset": ({"rows": "rows"}, "rows", None),
    "narrowed": ({"starts": f"int64[rows] = i * {WIDTH}"}, "rows", FIRST + 1),
    "shifted": ({}, "rows", FIRST + 1),
}


def launch_of(name: str) -> Launch:
    more, grid, _ = CASES[name]
    arguments = {**ROWS, **more}
    return Launch(
        kernel=name, sizes={"rows": 60}, grid=(grid,), arguments=arguments, sweep=("rows",)
    )


def horizon_of(name: str, launch: Launch) -> KernelHorizon:
    kernels, files, _ = load_kernels(FILE)
    kernel = next(one for one in kernels if one.name == name)
    return kernel_horizon(kernel, [launch], [str(path) for path in files])


@pytest.mark.parametrize("name", CASES)
def test_the_size_is_that_of_arithmetic(name: str) -> None:
    found = horizon_of(name, launch_of(name))
    assert not found.why
    wrong = [one.wrong_at for one in found.statements if one.wrong_at is not None]
    expected = CASES[name][2]
    assert wrong == [] if expected is None else min(wrong) == expected


def test_a_row_that_wraps_reads_four_gibi_elements_before_its_tensor() -> None:
    (one,) = horizon_of("row_product", launch_of("row_product")).statements
    assert (one.access.tensor, one.access.lands, one.access.away) == ("x", "", -(LIMIT * 2 * 2))
    assert one.effect == "reads 8 GiB before the element of x, outside all tensors"
    assert (one.site.text, one.site.line) == ("row * stride", 10)


def test_lanes_that_wrap_behind_the_mask_are_told_from_those_that_are_read() -> None:
    launch = launch_of("masked_tail")
    launch = replace(launch, arguments={**launch.arguments, "x": "float16[rows, 5000]"})
    (one,) = horizon_of("masked_tail", launch).statements
    first = LIMIT // 5000 + 1
    assert one.wraps_at == first // 64 * 64 + 1  # where the tile of 64 rows begins
    assert one.wrong_at == first + 1


def test_a_mask_that_a_wrapped_index_passes_is_an_access() -> None:
    arguments = {"x": "int8[count]", "count": "count", "BLOCK": 64}
    launch = Launch(
        kernel="lost_mask", sizes={"count": 6400}, grid=("cdiv(count, 64)",), arguments=arguments,
        sweep=("count",), tail=(2,),
    )  # fmt: skip
    assert horizon_of("lost_mask", launch).statements == ()  # the tile ends at 2^31 - 1
    (one,) = horizon_of("lost_mask", replace(launch, grid=("cdiv(count, 64) + 1",))).statements
    assert one.access.kind == "reads what its mask excludes"


def test_a_wrap_that_reaches_no_address_is_kept_without_an_effect() -> None:
    (one,) = horizon_of("unused", launch_of("unused")).statements
    assert (one.wraps_at, one.wrong_at) == (FIRST + 1, None)
    assert one.effect == "no access uses the wrapped value"


def test_a_grid_that_no_gpu_has_is_no_horizon() -> None:
    launch = replace(launch_of("row_product"), grid=(1, "rows"))
    kernels, files, _ = load_kernels(FILE)
    kernel = next(one for one in kernels if one.name == "row_product")
    with running(kernel.function, [str(path) for path in files]) as run:
        search = Search(run, kernel.function.arg_names, launch)
        assert search.at("rows", 65536) is None
        assert list(search.statements()) == []


def test_a_launch_outside_of_its_tensors_is_refused() -> None:
    launch = replace(launch_of("row_product"), arguments={**ROWS, "x": f"float16[1, {WIDTH}]"})
    found = horizon_of("row_product", replace(launch, grid=("rows + 1",)))
    assert found.why == "the launch accesses memory outside of its tensors"


def test_a_kernel_that_cannot_run_says_what_is_missing_and_the_others_go_on() -> None:
    found = survey(FILE)
    why = {one.kernel: one.why for one in found.not_run}
    assert "NameError" in why["not_here"] or "no_such_function" in why["not_here"]
    assert "row_product" not in why
    assert found.exit_code == 3
    assert found.to_dict()["kernels"]


def test_assumed_launches_find_the_wrap_and_are_never_reached() -> None:
    found = survey(FILE, op=":row_product", deployment=Deployment())
    assert {row.statement.size for row in found.rows} >= {"stride"}
    assert found.reached == []
    kernels, _, _ = load_kernels(FILE)
    launch = next(assumed_launches(next(one for one in kernels if one.name == "page")))
    assert launch.arguments["table"].startswith("int32[")
    assert "values_table" in launch.sweep


def test_a_deployment_reaches_a_described_horizon_or_not() -> None:
    launch = launch_of("row_product")
    launch = replace(launch, sizes={"tokens": 100}, grid=("tokens",), sweep=("tokens",),
                     arguments={**ROWS, "x": X.replace("rows", "tokens")})  # fmt: skip
    for tokens, code in ((FIRST, 0), (FIRST + 1, 1)):
        deployment = Deployment(batched_tokens=tokens)
        found = survey(FILE, op=":row_product", deployment=deployment, launches=[launch])
        assert found.exit_code == code
        (row,) = found.rows
        assert row.margin == (FIRST + 1) / tokens
    within = replace(launch, within={"tokens": "2 * tokens"})
    found = survey(
        FILE, op=":row_product", deployment=Deployment(batched_tokens=FIRST + 1), launches=[within]
    )
    assert found.exit_code == 0


def test_a_deployment_that_does_not_fit_the_op_is_one_line() -> None:
    launch = replace(launch_of("row_product"), needs="rows < 50")
    with pytest.raises(
        InvalidCase, match="must fit row_product, which needs rows < 50, got rows 60"
    ):
        survey(FILE, op=":row_product", deployment=Deployment(), launches=[launch])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("heads = 30", "heads must be a multiple of kv_heads 8, got 30"),
        ("layers = 0", "layers must be an int of at least 1, got 0"),
        ("colour = 1", "must have only"),
        ("heads", "deployment must be TOML"),
    ],
)
def test_a_wrong_deployment(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "one.toml"
    file.write_text(text)
    with pytest.raises(InvalidCase, match=message):
        read_deployment(str(file), {})


def test_presets_and_flags() -> None:
    assert len(PRESETS) == 12
    one = read_deployment("DeepSeek-V3", {"batched_tokens": 131073})
    assert (one.limits["tokens"], one.token_bytes) == (131073, 576 * 2 * 61)
    assert PRESETS["Llama-3.1-8B"].token_bytes == 2 * 8 * 128 * 2 * 32
    with pytest.raises(InvalidCase, match="one of Llama"):
        read_deployment("Llama-9", {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a]\ngrid = [1]", "must have grid and arguments"),
        ("[a]\ngrid = [1]\narguments = {}\ncolour = 1", "must have only"),
        ("[a]\ngrid = [1]\narguments = {}\nsizes = { n = 0 }", "must be a positive int, got 0"),
        ("[a]\nlike = 'b'", "must name a launch"),
        ("a = ", "must be a TOML file"),
    ],
)
def test_a_wrong_description(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "one.toml"
    file.write_text(text)
    with pytest.raises(InvalidCase, match=message):
        read_launches(file)


@pytest.mark.parametrize("text", ["__import__('os')", "x.__class__", "[i for i in x]", "1 +", "y"])
def test_an_expression_is_arithmetic_only(text: str) -> None:
    with pytest.raises(InvalidCase):
        evaluate(text, {"x": 1})


def test_attnlabs_own_descriptions_are_complete() -> None:
    launches = read_launches(LAUNCHES).values()
    assert len(launches) >= 12
    for one in launches:
        assert one.bind(one.sizes) is not None
        assert set(one.sweep) <= set(one.sizes)


def test_a_run_of_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(InvalidCase, match="op must be part of the path or name"):
        survey(FILE, op="no such kernel")
    with pytest.raises(InvalidCase, match="must be a Python file, a wheel or a folder"):
        survey(FILE.with_name("nothing.txt"))
    kernels, _, _ = load_kernels(FILE)
    kernel = next(one for one in kernels if one.name == "row_product")
    kernel.name = "other"
    with pytest.raises(Unavailable):
        _ = kernel.function
