"""verify says "equal" of what is equal, and catches each way of being wrong, by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from gpt3d.config.load import compose
from gpt3d.verification.cases import Case
from gpt3d.verification.compare import RankResult, plain_result
from gpt3d.verification.matrix import HARDEST, MATRIX
from gpt3d.verification.tiny import tiny_config
from gpt3d.verification.verdict import markdown, table, verify
from gpt3d.verify import main
from tests.verify import sabotage

FAULTS = [
    (sabotage.no_tied_sum, Case(pp=2, family="gpt", zero=1), "embedding.word.weight"),
    (sabotage.no_norm_sum, Case(tp=2, sp=True, zero=2), "norm"),
    (sabotage.no_data_average, Case(dp=2, zero=0), "ranks report different gradient norms"),
    (sabotage.swapped_stages, Case(pp=2, zero=1), "departs first in step 1"),
    (sabotage.norm_without_rank_1, Case(pp=2, zero=0), "departs first in step 1|ranks report|look at"),
    (sabotage.deepspeed_norm_without_rank_1, Case(pp=2, zero=2), "departs first in step 1|ranks report|look at"),
]


@pytest.mark.parametrize("body, case, named", FAULTS, ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.usefixtures("_fork_server")
def test_a_fault_is_caught_and_named(body: Callable[..., RankResult], case: Case, named: str) -> None:
    verdict = verify(case.config(), "cpu", plain_result(case.family), body)
    assert not verdict.equal
    text = table(verdict)
    assert "DIFFERENT" in text
    assert any(word in text for word in named.split("|")), text
    assert "**different**" in markdown({"layout": verdict})


@pytest.mark.usefixtures("_fork_server")
def test_a_sound_layout_is_equal() -> None:
    verdict = verify(Case(pp=2, dp=2, zero=2, micro=1).config(), "cpu")
    assert verdict.equal and not verdict.problem
    assert "DIFFERENT" not in table(verdict)


def test_the_command_tells_by_its_exit_code() -> None:
    def run(*overrides: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gpt3d.verify", *overrides]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    good = run("parallel=pp2", "parallel.dp=1", "zero=0")
    assert good.returncode == 0 and "equal to one plain process" in good.stdout, good.stderr
    bad = run("parallel.tp=3")
    assert bad.returncode == 2 and "parallel.tp=3" in bad.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--all zero=1", "take no overrides: zero=1"),
        ("--all --sample 3", "take one of them"),
        ("--sample -1", "0 or more"),
        ("--all --seed 3", "--seed goes with --sample"),
        ("zero=1 --markdown x.md", "--markdown goes with --all"),
        ("--all --markdown /dev/null/x.md", "can't be written"),
    ],
)
def test_options_without_effect_are_refused(
    arguments: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["verify", *arguments.split()])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=70b", "parallel=tp8_pp2", "zero=2"],
        ["model=125m", "parallel=tp2_pp2_dp2", "zero=3", "precision=bf16", "recompute=full"],
        ["model=8b", "parallel.pp=4", "parallel.layers_per_stage=[7,8,9,8]", "pipeline=zb_h1"],
        ["model=1b", "parallel.tp=16", "pipeline=interleaved", "parallel.pp=2"],
    ],
    ids=lambda value: " ".join(value),
)
def test_tiny_keeps_the_layout_and_the_family(overrides: list[str]) -> None:
    config = compose(overrides)
    tiny, _ = tiny_config(config)
    for key in ("tp", "pp", "sequence_parallel"):
        assert getattr(tiny.parallel, key) == getattr(config.parallel, key)
    assert (tiny.pipeline, tiny.precision, tiny.recompute) == (config.pipeline, config.precision, config.recompute)
    assert (tiny.zero.stage, tiny.zero.offload_param) == (config.zero.stage, config.zero.offload_param)
    for key in ("position", "norm", "activation", "bias", "tied_embeddings"):
        assert getattr(tiny.model, key) == getattr(config.model, key)
    shared = config.model.num_heads // config.model.num_kv_heads > 1
    assert (tiny.model.num_heads // tiny.model.num_kv_heads > 1) == shared
    copied = config.parallel.tp // config.model.num_kv_heads
    assert max(1, tiny.parallel.tp // tiny.model.num_kv_heads) == max(1, copied)
    pieces = tiny.parallel.pp * tiny.pipeline.chunks
    if tiny.parallel.layers_per_stage is None:
        assert tiny.model.num_layers % pieces == 0
    assert tiny.trainer.global_batch_size % ((tiny.parallel.dp or 1) * tiny.parallel.pp) == 0


def test_matrix_covers_every_axis_with_every_stage() -> None:
    cases = [*MATRIX, *HARDEST]
    assert len({str(case) for case in cases}) == len(cases) >= 60
    for stage in range(4):
        mine = [case for case in cases if case.zero == stage]
        assert {1, 2} <= {case.tp for case in mine}
        assert {1, 2, 4} <= {case.pp for case in mine}
        assert {1, 2} <= {case.dp for case in mine}
        assert {"gpipe", "1f1b", "interleaved", "zb_h1"} == {case.schedule for case in mine}
        assert {"fp32", "bf16"} == {case.dtype for case in mine}
        assert {"none", "selective", "full"} == {case.recompute for case in mine}
        assert any(case.sp for case in mine)
    assert {case.family for case in cases} >= {"gpt", "gpt_untied", "llama", "llama_tied", "one_kv_head"}
    assert any(case.offload_optimizer == "cpu" for case in cases) and any(case.offload_param == "cpu" for case in cases)
