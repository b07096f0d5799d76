"""Inline assembly of kernels: PTX in float32."""

import numpy as np
import pytest

from attnlab.kernels.triton.assembly import run_ptx

SOFTPLUS = """{
    .reg .pred p;
    setp.gt.f32 p, $1, 20.;
    @p mov.f32 $0, $1;
    @!p mul.f32 $0, $1, 1.4426950408889634;
    @!p ex2.approx.ftz.f32 $0, $0;
    @!p add.f32 $0, $0, 1.0;
    @!p lg2.approx.ftz.f32 $0, $0;
    @!p mul.f32 $0, $0, 0.6931471805599453;
}"""
NUMBERS = np.array([-200.0, -3.0, 0.0, 19.0, 21.0, 300.0], np.float32)


def test_a_softplus_in_assembly():
    (found,) = run_ptx(SOFTPLUS, "=r,r", [NUMBERS])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.logaddexp(0, NUMBERS.astype(float)), rtol=2e-6, atol=1e-7)


def test_faults_in_assembly_change_the_result():
    (right,) = run_ptx(SOFTPLUS, "=r,r", [NUMBERS])
    for before, after in {"@p mov": "@!p mov", "$1, 1.44": "$1, 1.0", "0.69": "0.60"}.items():
        (found,) = run_ptx(SOFTPLUS.replace(before, after), "=r,r", [NUMBERS])
        assert not np.allclose(found, right, equal_nan=True)


def test_what_nothing_is_written_to_is_nan_and_small_numbers_are_flushed():
    text = "setp.lt.f32 p, $2, 0.; @p neg.f32 $0, $2; mul.ftz.f32 $1, $2, 1e-38;"
    first, second = run_ptx(text, "=r,=r,r", [np.array([-2.0, 0.5], np.float32)])
    np.testing.assert_array_equal(first, np.array([2.0, np.nan], np.float32))
    np.testing.assert_allclose(second, [-2e-38, 0.0])


@pytest.mark.parametrize(
    "text", ["add.u32 $0, $1, 1;", "mov.f32 $0, %laneid;", "add.rz.f32 $0, $1, 1.;", "bar.sync 0;"]
)
def test_other_assembly_is_refused(text):
    with pytest.raises(NotImplementedError):
        run_ptx(text, "=r,r", [NUMBERS])
    with pytest.raises(NotImplementedError):
        run_ptx("mov.f32 $0, $1;", "=r,r", [NUMBERS.astype(np.int32)])
