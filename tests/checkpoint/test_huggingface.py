"""Export and import: an independent reading of the exported folder gives our logits; the way back gives our bits."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt3d import export
from gpt3d.checkpoint import folder, huggingface, safetensors
from gpt3d.checkpoint.blocks import CorruptCheckpoint
from gpt3d.checkpoint.initial import load_initial
from gpt3d.checkpoint.reader import SavedTensors
from gpt3d.checkpoint.settings import check_initial, plain
from gpt3d.checkpoint.state import held_state
from gpt3d.config.load import compose, conf_dir
from gpt3d.config.problems import ConfigError
from gpt3d.config.schema import LrConfig, ModelConfig, RunConfig, TokenizerConfig
from gpt3d.verification.cases import FAMILIES, Case
from tests.checkpoint import simulated

VOCAB = 263  # the byte tokenizer has 257, and padding to 16 adds rows that must not be exported
CLOSE = 2e-5  # root mean square difference of logits, in their standard deviations; both sides compute in fp32
FORMS = {
    "llama": FAMILIES["llama"],  # grouped queries, Llama 3.1 frequencies
    "llama_tied": FAMILIES["llama_tied"],
    "llama_bias": dataclasses.replace(FAMILIES["one_kv_head"], bias=True),
    "gpt": FAMILIES["gpt"],
    "gpt_untied": FAMILIES["gpt_untied"],
}


@pytest.fixture(params=FORMS, scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    """A checkpoint of random numbers of each form, saved by TP 2 x DP 2."""
    model = dataclasses.replace(FORMS[request.param], vocab_size=VOCAB)
    return saved_by(Case(tp=2, dp=2, zero=2), model, request.param, tmp_path_factory.mktemp("saved"))


def saved_by(case: Case, model: ModelConfig, name: str, root: Path) -> tuple[RunConfig, Path]:
    """A checkpoint of random numbers in the layout of `case`."""
    FAMILIES[f"hf_{name}"] = model
    case = dataclasses.replace(case, family=f"hf_{name}")
    config = case.config()
    config.tokenizer, config.lr = TokenizerConfig(kind="bytes"), LrConfig(schedule="constant")
    config.cluster.name = "test"
    simulated.save(case, root / ".tmp-1")
    state = {"format": folder.FORMAT, "config": plain(config), "progress": {"step": 1}}
    folder.commit(root / ".tmp-1", root / folder.step_name(1), {folder.STATE: json.dumps(state)})
    return config, root / folder.step_name(1)


def family_of(config: RunConfig) -> str:
    return next(name for name, model in FAMILIES.items() if model is config.model)


def test_the_exported_folder_read_independently_gives_our_logits(
    saved: tuple[RunConfig, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, source = saved
    export.export(source, tmp_path / "hf", "fp32", shard_gb=3e-5)
    described = json.loads((tmp_path / "hf" / "config.json").read_text())
    index = json.loads((tmp_path / "hf" / safetensors.INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 2
    tensors = read_plainly(tmp_path / "hf")
    assert tensors.keys() == index["weight_map"].keys() and described["vocab_size"] == VOCAB
    assert index["metadata"]["total_size"] == sum(4 * t.numel() for t in tensors.values())
    whole = SavedTensors(source)
    weights = {k[8:]: torch.from_numpy(whole.read(k)) for k in whole.tensors if k.startswith("weights/")}
    ids = torch.randint(0, VOCAB, (1, 16), generator=torch.Generator().manual_seed(3))
    ours = export.our_logits(config, weights.__getitem__, ids)
    theirs = (llama_logits if described["model_type"] == "llama" else gpt2_logits)(tensors, described, ids[0])
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))
    assert ours.std() > 0.1
    assert "weights are the checkpoint's" in export.check(source, tmp_path / "hf", config)
    with pytest.raises(export.ExportError, match="exists"):
        export.export(source, tmp_path / "hf")
    assert export.main([str(source), "--to", str(tmp_path / "other"), "--shard-gb", "0"]) == 2
    with monkeypatch.context() as patch, pytest.raises(export.ExportError, match="not exported"):
        patch.setattr(export, "our_logits", lambda *_: ours + 1.0)
        export.export(source, tmp_path / "other", "fp32", checked=True)
    assert not list(tmp_path.glob("*other*")), "an export that is not the same model is not left behind"


def test_back_into_any_layout_to_the_bit(saved: tuple[RunConfig, Path], tmp_path: Path) -> None:
    config, source = saved
    export.export(source, tmp_path / "hf", "fp32")
    for case in (Case(tp=2, pp=2, dp=2, zero=3), Case(dp=3, zero=1)):
        case = dataclasses.replace(case, family=family_of(config))
        for state, right in zip(simulated.ranks(case), simulated.answers(case), strict=True):
            load_initial(tmp_path / "hf", held_state(state, config.model), config.model)
            for fragment, want in zip(state.pieces, right, strict=True):
                got = fragment.tensors["weights"]
                assert torch.equal(got.nan_to_num(7.0), want["weights"].nan_to_num(7.0)), fragment.placement.name
                assert fragment.tensors["exp_avg"].nan_to_num(0.0).abs().max() == 0


def test_in_transformers_itself(saved: tuple[RunConfig, Path], tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: `pip install transformers` runs this")
    from transformers import AutoTokenizer

    config, source = saved
    for dtype in ("fp32", "bf16"):
        export.export(source, tmp_path / dtype, dtype)
        assert "logits in transformers and here differ" in export.check(source, tmp_path / dtype, config)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "fp32")
    assert tokenizer("Ärger 1\n")["input_ids"] == list("Ärger 1\n".encode())
    assert tokenizer.decode([195, 132, 256]) == "Ä<|endoftext|>"


LAYOUTS = (
    Case(tp=2, pp=2, zero=1),
    Case(tp=2, pp=2, dp=2, zero=3),
    Case(pp=2, dp=2, zero=2, layers=(1, 3)),
    Case(tp=4, pp=2, zero=0),
    Case(tp=2, pp=2, schedule="interleaved", chunks=2),
)
PRESETS = sorted(path.stem for path in (conf_dir() / "model").glob("*.yaml"))
QUICK = ("125m", "1b", "2.7b", "70b")  # heads of 8 and 10; tied and scaled; 8 queries a key. The others are slow


def preset(name: str) -> ModelConfig:
    """A published size in small: the same head sizes (an eighth), ratios, rotary scaling, ties and biases."""
    model = compose([f"model={name}"]).model
    group = model.num_heads // model.num_kv_heads
    kv_heads = 2 if group > 1 else 4
    hidden = model.hidden_size * kv_heads * group // (8 * model.num_heads)
    return dataclasses.replace(
        model, num_layers=4, hidden_size=hidden, num_heads=kv_heads * group, num_kv_heads=kv_heads,
        head_dim=model.head_dim // 8, ffn_hidden_size=round(model.ffn_hidden_size / model.hidden_size * hidden / 8) * 8,
        vocab_size=VOCAB, vocab_multiple=16, max_seq_len=64,
        rope_scaling=dataclasses.replace(model.rope_scaling, original_max_seq_len=256),
    )  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PRESETS]
)
def test_presets_in_transformers_and_back(name: str, tmp_path: Path) -> None:
    """Saved with TP and PP, exported: their logits are ours. Written by them, read by us: the bits that we had."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    case = LAYOUTS[PRESETS.index(name) % len(LAYOUTS)]
    config, source = saved_by(case, preset(name), name, tmp_path)
    whole = SavedTensors(source)
    weights = {k[8:]: torch.from_numpy(whole.read(k)) for k in whole.tensors if k.startswith("weights/")}
    ids = torch.randint(0, VOCAB, (1, 64), generator=torch.Generator().manual_seed(3))
    for dtype, kept in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        export.export(source, tmp_path / dtype, dtype)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / dtype, dtype=torch.float32)
        with torch.no_grad():
            theirs = model.eval()(ids).logits[0]
        ours = export.our_logits(config, lambda name, kept=kept: weights[name].to(kept).float(), ids)
        assert (theirs - ours).square().mean().sqrt() < CLOSE * ours.std(), dtype
        if dtype == "fp32":
            model.save_pretrained(tmp_path / "theirs")
    check_initial(dataclasses.replace(config, init_from=str(tmp_path / "theirs")))
    other = dataclasses.replace(LAYOUTS[(PRESETS.index(name) + 1) % len(LAYOUTS)], family=f"hf_{name}")
    for state, right in zip(simulated.ranks(other), simulated.answers(other), strict=True):
        load_initial(tmp_path / "theirs", held_state(state, config.model), config.model)
        for fragment, want in zip(state.pieces, right, strict=True):
            got = fragment.tensors["weights"]
            assert torch.equal(got.nan_to_num(7.0), want["weights"].nan_to_num(7.0)), fragment.placement.name


def test_published_sizes_have_a_class_and_their_config_reads_back() -> None:
    for name in ("125m", "1b", "70b"):  # GPT-3; Llama tied and scaled; Llama
        model = compose([f"model={name}"]).model
        described = huggingface.to_config(model, "bfloat16", 0)
        for old_words in (False, True):  # version 4 of transformers knew no rope_parameters
            if old_words:
                described.pop("rope_parameters", None)
            for key, value in huggingface.from_config(described).items():
                ours: Any = model
                for attribute in key.split("."):
                    ours = getattr(ours, attribute)
                assert ours == value, (name, key)
        assert set(huggingface.parts(model)), name


def test_another_model_than_configured_is_refused_with_the_right_values(
    saved: tuple[RunConfig, Path], tmp_path: Path
) -> None:
    config, source = saved
    export.export(source, tmp_path / "hf")
    other = dataclasses.replace(
        config, model=dataclasses.replace(config.model, num_layers=2, norm_eps=0.1), init_from=str(tmp_path / "hf")
    )
    with pytest.raises(ConfigError, match=r"model\.num_layers=2: .* has 4") as error:
        check_initial(other)
    assert [p.key for p in error.value.problems] == ["model.num_layers", "model.norm_eps"]
    check_initial(dataclasses.replace(config, init_from=str(tmp_path / "hf")))
    check_initial(dataclasses.replace(config, init_from=str(source)))
    with pytest.raises(ConfigError, match="no such folder"):
        check_initial(dataclasses.replace(config, init_from=str(tmp_path / "hg")))
    for text, why in (('{"architectures": ["LlamaForCausalLM"]}', "has no 'num_"), ("{", "is no JSON")):
        (tmp_path / "hf" / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=rf"init_from=.*config\.json {why}"):
            check_initial(dataclasses.replace(config, init_from=str(tmp_path / "hf")))


def changed_folder(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Write the weights of an exported folder again, after `change`."""
    tensors = read_plainly(path)
    change(tensors)
    (path / "model.safetensors").unlink()
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    safetensors.write_safetensors(path / "model.safetensors", shapes, torch.float32, tensors.__getitem__)


def test_tensors_that_do_not_fit_are_told_before_anything_starts(saved: tuple[RunConfig, Path], tmp_path: Path) -> None:
    config, source = saved
    path = tmp_path / "hf"
    export.export(source, path, "fp32")
    config = dataclasses.replace(config, init_from=str(path))
    first, *_, last = read_plainly(path)

    def wrong(tensors: dict[str, Tensor]) -> None:
        del tensors[last]
        tensors[first] = tensors[first][:-1]
        tensors["odd.weight"] = torch.zeros(3)

    changed_folder(path, lambda tensors: tensors.update({"h.0.attn.bias": torch.ones(2)}))  # a mask, and no weight
    check_initial(config)
    changed_folder(path, wrong)
    with pytest.raises(ConfigError) as error:
        check_initial(config)
    for text in (f"{last} is missing", f"{first} has the shape [", "odd.weight is in no place of this model"):
        assert text in str(error.value)
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"holds no \*\.safetensors"):
        check_initial(config)


def test_gpt2_as_it_was_published(tmp_path: Path) -> None:
    """Names without a prefix, masks among the weights, the head stored though it is tied."""
    model = dataclasses.replace(FAMILIES["gpt"], vocab_size=VOCAB)
    config, source = saved_by(Case(), model, "published", tmp_path)
    path = tmp_path / "hf"
    export.export(source, path, "fp32")

    def published(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
        tensors["lm_head.weight"] = tensors["wte.weight"]

    changed_folder(path, published)
    check_initial(dataclasses.replace(config, init_from=str(path)))
    case = Case(tp=2, pp=2, family="hf_published")
    for state, right in zip(simulated.ranks(case), simulated.answers(case), strict=True):
        load_initial(path, held_state(state, model), model)
        for fragment, want in zip(state.pieces, right, strict=True):
            assert torch.equal(fragment.tensors["weights"].nan_to_num(7.0), want["weights"].nan_to_num(7.0))
    changed_folder(path, lambda tensors: tensors.update({"lm_head.weight": tensors["wte.weight"] + 1}))
    with pytest.raises(ConfigError, match=r"lm_head\.weight is in no place"):
        check_initial(dataclasses.replace(config, init_from=str(path)))


def test_a_cut_or_incomplete_folder_is_refused(saved: tuple[RunConfig, Path], tmp_path: Path) -> None:
    config, source = saved
    export.export(source, tmp_path / "hf", "bf16")
    path = tmp_path / "hf" / "model.safetensors"
    data = path.read_bytes()
    state = held_state(simulated.ranks(Case(zero=0, family=family_of(config)))[0], config.model)
    for cut in (4, 5000, len(data) - 2):
        path.write_bytes(data[:cut])
        with pytest.raises(CorruptCheckpoint, match=r"model\.safetensors"):
            load_initial(tmp_path / "hf", state, config.model)
    safetensors.write_safetensors(tmp_path / "hf" / "other", {"x": (1,)}, torch.float32, lambda _: torch.zeros(1))
    (tmp_path / "hf" / "other").rename(path)
    with pytest.raises(CorruptCheckpoint, match=r"is missing; .* and [0-9]+ more"):
        load_initial(tmp_path / "hf", state, config.model)


def test_no_class_for_a_mixture() -> None:
    for mixed in (
        dataclasses.replace(FAMILIES["gpt"], position="rope"),
        dataclasses.replace(FAMILIES["gpt"], num_kv_heads=1),
        dataclasses.replace(FAMILIES["gpt"], bias=False),
    ):
        with pytest.raises(huggingface.NoEquivalent, match="no Hugging Face class"):
            huggingface.parts(mixed)


# -- an independent reading, from the format's and the models' descriptions


def read_plainly(path: Path) -> dict[str, Tensor]:
    found = {}
    for file in path.glob("*.safetensors"):
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                values = np.frombuffer(data[8 + length + begin : 8 + length + end], "<f4")
                found[name] = torch.from_numpy(values.reshape(entry["shape"]).copy())
    return found


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[heads, s, d] -> [s, heads x d]."""
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    scores += torch.full_like(scores, -math.inf).triu(1)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def llama_logits(w: dict[str, Tensor], c: dict[str, Any], ids: Tensor) -> Tensor:
    d, heads, kv = c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + c["rms_norm_eps"]).sqrt() * w[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        y = x @ w[f"{name}.weight"].T
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    rope = c["rope_parameters"]
    inverse = [rope["rope_theta"] ** (-2 * i / d) for i in range(d // 2)]
    if rope["rope_type"] == "llama3":
        original = rope["original_max_position_embeddings"]
        for i, f in enumerate(inverse):
            wave = 2 * math.pi / f
            smooth = (original / wave - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            smooth = min(1.0, max(0.0, smooth))
            inverse[i] = (1 - smooth) * f / rope["factor"] + smooth * f
    angle = torch.arange(len(ids))[:, None] * torch.tensor(inverse + inverse)

    def turn(x: Tensor) -> Tensor:
        return x * angle.cos() + torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1) * angle.sin()

    x = w["model.embed_tokens.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        name = f"model.layers.{i}"
        y = norm(x, f"{name}.input_layernorm")
        q, k, v = (
            linear(y, f"{name}.self_attn.{p}_proj").view(len(ids), -1, d).transpose(0, 1) for p in ("q", "k", "v")
        )
        k, v = (t.repeat_interleave(heads // kv, 0) for t in (k, v))
        x = x + linear(attend(turn(q), turn(k), v), f"{name}.self_attn.o_proj")
        y = norm(x, f"{name}.post_attention_layernorm")
        x = x + linear(F.silu(linear(y, f"{name}.mlp.gate_proj")) * linear(y, f"{name}.mlp.up_proj"),
                       f"{name}.mlp.down_proj")  # fmt: skip
    head = w["model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"]
    return norm(x, "model.norm") @ head.T


def gpt2_logits(w: dict[str, Tensor], c: dict[str, Any], ids: Tensor) -> Tensor:
    d = c["n_embd"] // c["n_head"]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], c["layer_norm_epsilon"])

    def conv1d(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][: len(ids)]
    for i in range(c["n_layer"]):
        name = f"transformer.h.{i}"
        fused = conv1d(norm(x, f"{name}.ln_1"), f"{name}.attn.c_attn")
        q, k, v = (t.view(len(ids), -1, d).transpose(0, 1) for t in fused.chunk(3, -1))
        x = x + conv1d(attend(q, k, v), f"{name}.attn.c_proj")
        y = conv1d(norm(x, f"{name}.ln_2"), f"{name}.mlp.c_fc")
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + conv1d(y, f"{name}.mlp.c_proj")
    head = w["transformer.wte.weight" if c["tie_word_embeddings"] else "lm_head.weight"]
    return norm(x, "transformer.ln_f") @ head.T
