"""Coverage of interpreted kernels: each statement and each outcome of a branch, and nothing else changes."""

import ast

import torch
from helpers.sources import needs_triton

from attnlab.kernels.triton import interpreter
from attnlab.kernels.triton.coverage import Marker, is_measuring, mark_functions, marks, measuring
from attnlab.kernels.triton.launch_plan import LaunchPlan, launching

TEXT = '''
def outcomes(count, flag):
    """A text is no statement that runs."""
    total = 0
    for i in range(count):
        if i == 2:
            total += 10
        elif flag:
            total += 1
    while total > 5:
        total -= 5
    return "many" if total else "none"
'''


def run(*calls):
    """Return the results of the marked function, and the points of all calls."""
    tree = ast.parse(TEXT)
    mark_functions(tree)
    scope = marks("outcomes.py")
    exec(compile(tree, "outcomes.py", "exec"), scope)
    with measuring() as measured:
        results = [scope["outcomes"](*call) for call in calls]
    return results, measured.points["outcomes.py"]


def test_every_outcome_has_a_point():
    """The loop with and without an iteration, both outcomes of if, elif, while and the expression."""
    results, points = run((0, False))
    assert results == ["none"]
    assert points == {"4", "5", "5.0-", "10", "10.0-", "12", "12.0-"}
    results, points = run((3, True), (2, False), (0, True))
    assert results == ["many", "none", "none"]
    marker = Marker()
    marker.visit(ast.parse(TEXT).body[0])
    every = {f"{name}{sign}" for name in marker.branches for sign in "+-"}
    assert points == every | {str(line) for line in marker.statements}


def test_blocks_of_an_outcome():
    marker = Marker(offset=100)
    marker.visit(ast.parse(TEXT).body[0])
    first = marker.branches["106.0"]
    assert (first.kind, first.text) == ("if", "i == 2")
    assert (first.then, first.otherwise) == ((107, 107), (108, 109))
    assert marker.branches["105.0"].kind == "for"
    assert marker.branches["112.0"].then == (0, 0)


def test_a_measurement_begins_empty_and_ends():
    run((3, True))
    _, points = run((0, False))
    assert "6" not in points
    assert not is_measuring()


@needs_triton
def test_a_kernel_is_measured_and_computes_the_same():
    """Without a measurement the kernel has no marks; with one, the outcomes of constexpr are there, too."""
    triton = interpreter.interpreted_triton()
    tl = triton.language

    @triton.jit
    def part(x, DOUBLE: tl.constexpr):
        return x * 2 if DOUBLE else x

    @triton.jit
    def kernel(source, target, count, DOUBLE: tl.constexpr, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        if tl.program_id(0) > 0:
            return
        x = tl.load(source + at, mask=at < count, other=0.0)
        for _ in range(0, count, 2):
            x += 1
        tl.store(target + at, part(x, DOUBLE))

    kernel.fn.__globals__.update(tl=tl, part=part)
    outputs = []
    for measured in (False, True):
        target = torch.empty(4)
        with launching(LaunchPlan()):
            if measured:
                with measuring() as measured:
                    kernel[(2,)](torch.arange(4.0), target, 4, True, SIZE=4)
            else:
                kernel[(2,)](torch.arange(4.0), target, 4, True, SIZE=4)
        outputs.append(target)
    points = measured.points
    assert torch.equal(*outputs)
    assert outputs[0].tolist() == [4.0, 6.0, 8.0, 10.0]
    (found,) = points.values()
    first = kernel.rewriter.def_file_lineno
    expected = {0: ("1", "2", "3", "4", "5", "6", "7"), 2: ("2.0+", "2.0-"), 5: ("5.0+",)}
    lines = {str(first + int(n)) for n in expected[0]}
    outcomes = {f"{first + 2}.0+", f"{first + 2}.0-", f"{first + 5}.0+"}
    own = {point for point in found if int(point.partition(".")[0]) >= first}
    assert own == lines | outcomes
    assert f"{part.rewriter.def_file_lineno + 1}.0+" in found
    assert f"{part.rewriter.def_file_lineno + 1}.0-" not in found
