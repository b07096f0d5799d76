"""Linear attention: the plan, its bounds, rules, weights, and an op of a source with planted faults."""

import os
import subprocess
import sys

import pytest
import torch
from helpers.cases import refused
from helpers.commands import document
from helpers.state_models import ModelRunner

from attnlab.case.errors import InvalidCase, KernelFailed
from attnlab.cli.main import main
from attnlab.diagnosis.trials import Limit
from attnlab.kernels.vllm.source import find_source
from attnlab.library.op import package_of
from attnlab.linear import state_check
from attnlab.linear.run import SourceRunner, compare
from attnlab.linear.state_call import make_call
from attnlab.linear.state_case import STATE_OPS, StateCase, plain_fields, variants_of
from attnlab.linear.state_check import check_op, check_states, statements, xray_state
from attnlab.linear.state_claims import Trial, coded_plan, measure, read_slots, stored_facts
from attnlab.linear.state_plan import (
    HELD_BETA,
    INNER_BETA,
    READ_SCALE,
    SCORES_SCALE,
    Units,
    evaluate,
    right_plan,
    rules,
)

# An op that FLA's record binds: one program per sequence and head, written for this test.
KERNEL = """
import torch
import triton
import triton.language as tl


@triton.autotune(configs=[triton.Config({"PAD": 1}), triton.Config({"PAD": 2})], key=["K"])
@triton.jit
def kernel(q, k, v, g, beta, A_log, dt_bias, h0, ht, o, starts, scale, H: tl.constexpr, HV: tl.constexpr,
           K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
           HAS_STATE: tl.constexpr, NORM: tl.constexpr, V_FIRST: tl.constexpr,
           RAW: tl.constexpr, PAD: tl.constexpr):
    n, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(starts + n), tl.load(starts + n + 1)
    at_k, at_v = tl.arange(0, BK), tl.arange(0, BV)
    in_k, in_v = at_k < K, at_v < V
    inside = in_k[:, None] & in_v[None, :]
    place = (n * HV + head) * K * V
    if V_FIRST:
        place += at_k[:, None] + at_v[None, :] * K
    else:
        place += at_k[:, None] * V + at_v[None, :]
    state = tl.zeros([BK, BV], dtype=tl.float32)
    if HAS_STATE:
        state += tl.load(h0 + place, mask=inside, other=0.0)
    for i in range(end - first):
        row = first + i.to(tl.int64)
        key_row = (row * H + head // (HV // H)) * K + at_k
        query = tl.load(q + key_row, mask=in_k, other=0.0).to(tl.float32)
        key = tl.load(k + key_row, mask=in_k, other=0.0).to(tl.float32)
        value = tl.load(v + (row * HV + head) * V + at_v, mask=in_v, other=0.0).to(tl.float32)
        if NORM:
            query = query / tl.sqrt(tl.sum(query * query) + 1e-6)
            key = key / tl.sqrt(tl.sum(key * key) + 1e-6)
        gate = tl.load(g + row * HV + head).to(tl.float32)
        weight = tl.load(beta + row * HV + head).to(tl.float32)
        if RAW:
            gate += tl.load(dt_bias + head)
            softplus = tl.where(gate < 20.0, tl.log(1 + tl.exp(gate)), gate)
            gate = -tl.exp(tl.load(A_log + head)) * softplus
            weight = tl.sigmoid(weight)
        state *= tl.exp(gate)
        held = tl.sum(state * key[:, None], 0)
        new = (value - held) * weight
        state += key[:, None] * new[None, :]
        out = tl.sum(state * query[:, None], 0) * scale
        tl.store(o + (row * HV + head) * V + at_v, out, mask=in_v)
    tl.store(ht + place, state, mask=inside)


def fused_recurrent_gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state,
                                     use_qk_l2norm_in_kernel, cu_seqlens, state_v_first=False,
                                     use_beta_sigmoid_in_kernel=False, **kwargs):
    A_log, dt_bias = kwargs.get("A_log"), kwargs.get("dt_bias")
    raw = kwargs.get("use_gate_in_kernel", False)
    assert raw == use_beta_sigmoid_in_kernel == (A_log is not None)
    n, (heads, size), values = len(cu_seqlens) - 1, k.shape[2:], v.shape[2:]
    if size > 128:
        raise ValueError("keys must have at most 128 elements")
    o = torch.empty_like(v)
    shape = (values[1], size) if state_v_first else (size, values[1])
    final = torch.empty(n, values[0], *shape)
    kernel[(n, values[0])](
        q, k, v, g, beta, A_log, dt_bias, initial_state, final, o, cu_seqlens, scale, heads, values[0], size,
        values[1], triton.next_power_of_2(size), triton.next_power_of_2(values[1]),
        initial_state is not None, use_qk_l2norm_in_kernel, state_v_first,
        raw,
    )
    return o, final
"""
OP = STATE_OPS["fla_fused_recurrent_gated_delta_rule"]


@pytest.fixture(autouse=True)
def few_edits(monkeypatch):
    """Try few edits of a source, and check cases of the usual features with few tokens."""
    monkeypatch.setattr(state_check, "_LIMIT", Limit(edits=20, seconds=2.0))
    monkeypatch.setattr(state_check, "variants_of", short_variants)


def short_variants(op):
    """Return the hostile cases of an op with at most seven tokens of a sequence."""
    return {
        name: case.replace(query_lens=tuple(min(count, 7) for count in case.query_lens))
        for name, case in variants_of(op).items()
    }


def source_of(folder, text=KERNEL, op="gated_delta_rule"):
    """Return a checkout of FLA with this kernel alone."""
    file = folder / "fla" / "ops" / op / "fused_recurrent.py"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    return find_source(folder, package_of("fla"))


def recurrence(call):
    """Return output and final states by the definition, one sequence, head and token after the other."""
    group = call.value.shape[1] // call.key.shape[1]
    gate = call.exact_gate if call.raw_gate else call.gate.double()
    beta = call.b.double().sigmoid() if call.raw_gate else call.beta.double()
    output, states = torch.zeros_like(call.value, dtype=torch.float64), call.states.double().clone()
    for seq, slot in enumerate(call.tables[:, 0].tolist()):
        for head in range(call.value.shape[1]):
            load = int(call.loads[seq])
            state = torch.zeros_like(states[0, 0]) if load < 0 else call.states[load, head].double()
            for row in call.rows_of(seq):
                query, key = (one[row, head // group].double() for one in (call.query, call.key))
                if call.use_norm:
                    query, key = (one / (one.dot(one) + 1e-6).sqrt() for one in (query, key))
                state = state * gate[row, head].exp()
                value = call.value[row, head].double()
                if call.op.delta:
                    value = beta[row, head] * (value - state @ key)
                elif call.op.steps:
                    value = call.step[row, head] * value
                state = state + value[:, None] * key
                output[row, head] = call.scale * (state @ query)
                if call.op.skip:
                    output[row, head] += call.D[head].double() * call.value[row, head].double()
            states[slot, head] = state
    return output, states


@pytest.mark.parametrize(
    "name",
    [
        "fla_chunk_gated_delta_rule",
        "fla_chunk_kda",
        "fla_chunk_simple_gla",
        "vllm_mamba_chunk_scan",
    ],
)
def test_the_plan_is_the_recurrence_in_chunks(name):
    lens = (70, 0, 3) if STATE_OPS[name].empty else (70, 2, 3)
    fields = {**plain_fields(STATE_OPS[name]), "query_lens": lens, "initial": "some"}
    call = make_call(StateCase(op=name, **fields))
    output, states = recurrence(call)
    for chunk in (1, 16, 64):
        found = evaluate(right_plan(call).replace(chunk=chunk))
        torch.testing.assert_close(found.output, output, rtol=0, atol=1e-12)
        torch.testing.assert_close(found.states, states, rtol=0, atol=1e-12)


def test_a_state_for_each_speculative_token():
    case = StateCase(query_lens=(3, 2), spec_tokens=3, seed=4)
    call = make_call(case)
    found = evaluate(right_plan(call))
    assert call.num_accepted_tokens is not None
    for seq, (count, accepted) in enumerate(
        zip(case.query_lens, call.num_accepted_tokens, strict=True)
    ):
        assert call.loads[seq] == call.tables[seq, accepted - 1]
        changed = (found.states != call.states.double()).flatten(1).any(1)
        assert changed[call.tables[seq]].tolist() == [i < count for i in range(3)]


def test_bounds_follow_the_dtype():
    bounds = []
    for dtype in ("bfloat16", "float16", "float32"):
        call = make_call(StateCase(op="fla_chunk_gated_delta_rule", dtype=dtype))
        found = evaluate(right_plan(call), Units.of(call))
        bounds.append(float((found.output_bound / found.output.abs().mean()).mean()))
        assert compare(call, ModelRunner()).is_right
    assert bounds[0] > 4 * bounds[1] > 100 * bounds[2]
    assert bounds[0] < 0.2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_v_heads", 3),
        ("initial", "some"),
        ("query_lens", (2, 1)),
        ("skipped", 3),
        ("dtype", "int8"),
        ("op", "unknown"),
    ],
)
def test_a_wrong_field_is_refused_in_one_line(field, value):
    with refused(field):
        StateCase(**{"query_lens": (1, 1), field: value})


def few(op):
    """Return some hostile cases of an op, the smallest and one of several chunks."""
    cases = sorted(variants_of(op).values(), key=lambda case: sum(case.query_lens))
    return [
        *cases[:4],
        *(one for one in cases[4:] if one.spec_tokens or sum(one.query_lens) > 140),
    ][:6]


RULES = {rule.text: rule for rule in rules()}


def test_parts_of_a_chunk_without_scale_or_beta_add_up():
    """The output is scale × (read + scores); without beta in both subtractions, beta multiplies values."""
    call = make_call(StateCase(op="fla_chunk_gated_delta_rule", query_lens=(70, 3)))
    plan = right_plan(call)
    right = evaluate(plan).output
    parts = [evaluate(plan.without(part)).output for part in (READ_SCALE, SCORES_SCALE)]
    torch.testing.assert_close(parts[0] + parts[1], (1 + 1 / plan.scale) * right)
    found = evaluate(plan.without(INNER_BETA, HELD_BETA)).output
    expected = evaluate(plan.replace(held_beta=torch.ones_like(plan.held_beta))).output
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "vllm_fused_recurrent_gated_delta_rule",
            "a sequence loads the state of the next sequence",
        ),
        ("vllm_fused_recurrent_gated_delta_rule", "the state is stored in the slot after its own"),
        (
            "vllm_fused_recurrent_gated_delta_rule",
            "a sequence loads the state after its first token, not after the accepted ones",
        ),
        ("fla_chunk_gated_delta_rule", "the state is lost after every 64 tokens"),
        ("fla_chunk_gated_delta_rule", "missing: the gate of a whole chunk"),
        ("fla_chunk_gated_delta_rule", "missing: the scale, where the output reads the state"),
        ("fla_chunk_gated_delta_rule", "missing: beta, in the subtraction within a chunk"),
        ("fla_chunk_kda", "the gate is missing"),
        ("fla_chunk_simple_gla", "no state is loaded: each sequence begins from 0"),
    ],
    ids=[
        "loads",
        "slot",
        "accepted",
        "chunks",
        "gate of a chunk",
        "scale of a read",
        "beta",
        "gate",
        "no state",
    ],
)
@pytest.mark.quick("loads", "chunks", "gate")
def test_a_planted_rule_is_named(name, text):
    op = STATE_OPS[name]
    edit = RULES[text].edit

    def run(call):
        return ModelRunner(edit=lambda plan: edit(call, plan))(call)

    trials = [Trial.of(case, run) for case in few(op)]
    claims = list(statements(trials, run))
    assert len(claims) == 1
    assert claims[0][0].said.startswith(text)
    assert claims[0][0].cases >= 1


def test_a_fault_in_one_head_is_told_from_one_in_all():
    def run(call):
        found = ModelRunner()(call)
        wrong = ModelRunner(edit=lambda plan: plan.replace(gate=0 * plan.gate))(call)
        found.output[:, 0], found.states[:, 0] = wrong.output[:, 0], wrong.states[:, 0]
        return found

    trials = [Trial.of(case, run) for case in few(OP)]
    (claim, _), *rest = statements(trials, run)
    assert claim.said.startswith("in the first value head: the gate is missing")
    assert not rest


def test_weights_are_those_of_the_plan():
    call = make_call(StateCase(op=OP.name, query_lens=(5, 2), dtype="float32"))
    found = measure(call, ModelRunner())
    right = evaluate(coded_plan(call, right_plan(call)))
    torch.testing.assert_close(found.output, right.output, rtol=0, atol=1e-6)
    assert found.is_linear
    assert found.deviation.is_right
    sources = found.by_source()
    assert not sources[:5, :, 5:7].any()
    assert not sources[5:, :, :5].any()
    assert sources[:, :, 7:].any(-1).all()  # a state before the call


def test_a_right_kernel_has_no_finding(tmp_path):
    source = source_of(tmp_path)
    found = check_op(OP, source)
    assert found.findings == []
    assert found.ran == len(variants_of(OP)) > 10
    one = xray_state(StateCase(op=OP.name, query_lens=(4, 2)), tmp_path)
    assert one.status == "right"
    assert one.worst < 1


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("state *= tl.exp(", "state *= tl.exp2(", "exp2 is used in place of exp"),
        ("(value - held)", "(value)", "is not subtracted from the value"),
        ("place = (n * HV", "place = ((n ^ 1) * HV", None),
        (
            "tl.load(h0 + place",
            "tl.load(h0 + (n * HV + head) * K * V + at_k[:, None] * V + at_v[None, :]",
            "have keys and values exchanged",
        ),
        (
            "softplus = tl.where(gate < 20.0, tl.log(1 + tl.exp(gate)), gate)",
            "late = tl.load(dt_bias + head)\n"
            "            softplus = tl.log(1 + tl.exp(gate - late)) + late",
            "the bias of the gate is added after the softplus",
        ),
        ("tl.sigmoid(weight)", "weight", "beta is not passed through the sigmoid"),
        ("head // (HV // H)", "head % H", "modulo the number of key heads"),
        ("range(end - first)", "range(end - first - 1)", "the last token of a sequence"),
        ("tl.load(h0 + place", "tl.load(h0 - 4096 - place", "outside of its tensors"),
        # The keys after the end of a row are finite but for those after the tensor, which are NaN.
        (
            "tl.load(k + key_row, mask=in_k, other=0.0)",
            "tl.load(k + key_row)",
            "after the end of k",
        ),
        ("        tl.store(o", "        if i < 4:\n            tl.store(o", "that of token 4"),
    ],
    ids=[
        "exp2",
        "held",
        "place",
        "layout",
        "late bias",
        "raw beta",
        "heads",
        "last token",
        "outside",
        "after the end",
        "unwritten",
    ],
)
@pytest.mark.quick("exp2", "layout", "late bias", "heads", "outside", "unwritten")
def test_a_planted_fault_is_described(tmp_path, before, after, words):
    assert before in KERNEL
    found = check_op(OP, source_of(tmp_path, KERNEL.replace(before, after))).findings
    assert found
    if words is not None:
        assert words in found[0].title
        assert "confirmed on" in found[0].title


def test_an_edit_of_the_source_is_stated(tmp_path, monkeypatch):
    monkeypatch.setattr(state_check, "_LIMIT", Limit(edits=300, seconds=4.0))
    text = KERNEL.replace("out = tl.sum(state * query", "out = tl.sum(state + query")
    (found,) = check_op(OP, source_of(tmp_path, text)).findings
    assert "fused_recurrent.py, line" in found.title
    assert "`state * query[:, None]` in place of `state + query[:, None]`" in found.title


def test_a_slot_is_named():
    case = StateCase(query_lens=(1, 1, 1))

    def run(call):
        return ModelRunner(edit=lambda plan: plan.replace(loads=(0, *plan.loads[1:])))(call)

    weights = measure(make_call(case), run)
    assert list(read_slots(weights)) == [(0, 0, "slot 0, which belongs to no sequence")]
    call = make_call(case.replace(query_lens=(2, 1, 1), spec_tokens=2))
    (first, second), other = call.tables[0].tolist(), int(call.tables[1, 0])

    def stored(call):
        stores = (((1, second), (2, other)), (), *right_plan(call).stores[2:])
        return ModelRunner(edit=lambda plan: plan.replace(stores=stores))(call)

    trial = Trial(case=case, call=call, found=stored(call))
    said = dict(stored_facts(trial))
    assert f"slot {first} has the state before the call" in " ".join(said.values())
    assert "a slot gets the state after another token of its own sequence" in said
    assert "a slot gets the state of another sequence" in said


def test_a_script_repeats_a_call(tmp_path):
    lines = KERNEL.replace(", PAD: tl.constexpr", "").replace("i.to(tl.int64)", "i").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("@triton.autotune"))
    source_of(tmp_path, text.replace("* scale", "* 3"))
    for name in ("fla", "fla/ops", "fla/ops/gated_delta_rule"):
        (tmp_path / name / "__init__.py").touch()
    file = tmp_path / "repro.py"
    words = ["--source", str(tmp_path), "--op", OP.name, "--query-lens", "3,0,2", "--json"]
    words += ["--dtype", "float32", "--initial", "some", "--num-v-heads", "4"]
    assert main(["linear", *words, "--script", str(file), "--html", str(tmp_path / "a.html")]) == 1
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "1"}
    ran = subprocess.run(
        [sys.executable, file], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    output, states = (float(line.rpartition(" ")[2]) for line in ran.stdout.splitlines())
    assert output > 0.1
    assert states < 1e-5
    assert "attnlab" not in file.read_text().partition("import")[2]


def test_limits_and_failures(tmp_path):
    runner = SourceRunner(
        source=source_of(tmp_path, KERNEL.replace("return o,", "return o[..., :1],"))
    )
    with pytest.raises(KernelFailed, match="shape"):
        runner(make_call(StateCase(op=OP.name)))
    found = check_op(OP, source_of(tmp_path / "b", KERNEL.replace("size > 128", "size > 16")))
    assert any("at most 128" in text for text in found.left_out)
    assert found.findings == []
    text = KERNEL.replace(", state_v_first=False", "").replace("state_v_first", "False")
    found = check_op(OP, source_of(tmp_path / "c", text))
    lacking = [text for text in found.left_out if "has no argument state_v_first" in text]
    assert len(lacking) == len(variants_of(OP)) - found.ran == 2
    assert found.findings == found.not_run == []


def test_a_gpu_of_the_machine_is_not_used(tmp_path, monkeypatch):
    """A copy of a process that asked for a GPU cannot use it: each use of it raises."""
    made, used = "    o = torch.empty_like(v)\n", "    assert not torch.cuda.is_available()\n"
    used += '    with torch.cuda.device(0):\n        o = torch.empty(v.shape, device="cuda")\n'
    source = source_of(tmp_path, KERNEL.replace(made, used))

    def use():
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", use)
    assert compare(make_call(StateCase(op=OP.name)), SourceRunner(source=source)).is_right


def test_the_commands(tmp_path, capsys):
    source_of(tmp_path, KERNEL.replace("* scale", ""))
    words = ["--source", str(tmp_path), "--op", OP.name]
    found = document(capsys, ["check", "--library", "fla", *words], 1)
    assert found["findings"][0]["title"].startswith("the scale is missing")
    found = document(capsys, ["linear", *words, "--query-lens", "3,1"], 1)
    assert "the scale is missing" in found["sentences"][0]
    assert main(["check", "--library", "fla", "--source", str(tmp_path), "--op", "no"]) == 2
    assert main(["check", "--library", "fla", "--source", str(tmp_path), "--locate"]) == 2
    with pytest.raises(InvalidCase, match="op must be one of"):
        check_states("fla", tmp_path, ops=["no"])


# Gated linear attention with a gate for each token or a constant one for each head, in torch.
CONSTANT = """
import torch


def fused_recurrent_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None,
                               output_final_state=False, reverse=False, state_v_first=False, cu_seqlens=None):
    assert (g is None) != (g_gamma is None)
    gates = g[0].float() if g_gamma is None else g_gamma.expand(v.shape[1:3])
    out, final = torch.empty_like(v), []
    for seq, (first, end) in enumerate(cu_seqlens.unfold(0, 2, 1).tolist()):
        heads, size, width = *q.shape[2:], v.shape[3]
        state = torch.zeros(heads, size, width)
        if initial_state is not None:
            state = initial_state[seq].mT if state_v_first else initial_state[seq]
        rows = [*range(first, end)[:: -1 if reverse else 1]]
        for row, gate in zip(rows, gates[rows]):
            key, value, query = (one[0, row].float() for one in (k, v, q))
            state = state * gate.exp()[:, None, None] + key[:, :, None] * value[:, None]
            out[0, row] = (torch.einsum("hkv,hk->hv", state, query) * scale).to(out.dtype)
        final.append(state.mT if state_v_first else state)
    return out, torch.stack(final)
"""


@pytest.mark.parametrize(
    ("name", "before", "after", "words"),
    [
        ("_constant", "", "", None),
        ("_constant", "gate.exp()", "gate[:1].exp()", "all value heads take the gate of the first"),
        ("_constant", "gate.exp()", "torch.exp2(gate)", "exp2 is used in place of exp"),
        ("_constant", "gate.exp()", "gate.new_ones(heads)", "the gate is missing"),
        ("", "", "", None),
        ("", "gates[rows]", "gates[first:end]", "as far from the other end of its sequence"),
        ("", "g[0].float()", "g[0]", ""),
    ],
    ids=["right", "head 0", "exp2", "no gate", "each token", "reverse", "16 bits"],
)
def test_all_kinds_of_gates_are_given(tmp_path, name, before, after, words):
    """Faults that a constant gate, a walk from the last token, or gates in 16 bits alone show are found."""
    assert before in CONSTANT
    text = CONSTANT.replace(before, after) if before else CONSTANT
    op = STATE_OPS[f"fla_fused_recurrent_simple_gla{name}"]
    found = check_op(op, source_of(tmp_path, text, "simple_gla"))
    assert found.ran == len(variants_of(op)) > 10
    assert_finding(found.findings, words)


def assert_finding(findings, words):
    """Check that the first finding has some words, or that there is none."""
    assert bool(findings) == (words is not None)
    assert words is None or words in findings[0].title


# Kimi delta attention whose gates the op computes, also above a limit, in torch.
LIMITED = """
import torch


def fused_recurrent_kda(q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None,
                        output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None,
                        use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, lower_bound=None):
    out, final, group = torch.empty_like(v), [], v.shape[2] // k.shape[2]
    q, k, g, v, beta = (one[0].float() for one in (q, k, g, v, beta))
    if use_gate_in_kernel:
        rate, inner = A_log.exp()[:, None], g + dt_bias.view(g.shape[1:])
        g = -rate * torch.nn.functional.softplus(inner)
        if lower_bound is not None:
            g = lower_bound * (rate * inner).sigmoid()
        beta = beta.sigmoid()
    if use_qk_l2norm_in_kernel:
        q, k = (one / (one.square().sum(-1, keepdim=True) + 1e-6).sqrt() for one in (q, k))
    q, k = (one.repeat_interleave(group, 1) for one in (q, k))
    for seq, (first, end) in enumerate(cu_seqlens.unfold(0, 2, 1).tolist()):
        state = torch.zeros(v.shape[1], k.shape[2], v.shape[2])
        state = state if initial_state is None else initial_state[seq]
        for row in range(first, end):
            state = state * g[row].exp()[..., None]
            new = beta[row][:, None] * (v[row] - torch.einsum("hkv,hk->hv", state, k[row]))
            state = state + k[row][..., None] * new[:, None]
            out[0, row] = (torch.einsum("hkv,hk->hv", state, q[row]) * scale).to(out.dtype)
        final.append(state)
    return out, torch.stack(final)
"""


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("", "", None),
        ("(rate * inner).sig", "(A_log[:, None] * inner).sig", "without the exponential"),
        ("lower_bound * (", "5 * (", ""),
        ("g + dt_bias.view(g.shape[1:])", "g", "the bias of the gate is missing"),
    ],
    ids=["right", "rate", "sign", "bias"],
)
def test_gates_that_an_op_computes(tmp_path, before, after, words):
    text = LIMITED.replace(before, after) if before else LIMITED
    found = check_op(STATE_OPS["fla_fused_recurrent_kda"], source_of(tmp_path, text, "kda"))
    assert found.ran > 20
    assert_finding(found.findings, words)
