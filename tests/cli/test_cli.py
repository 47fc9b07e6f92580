"""The command line: exit codes, one JSON object on stdout, and nothing heavy for a help text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from mtp_zoo.cli import app, main
from mtp_zoo.errors import MTPZooError
from tests.heads import VOCAB, tiny_target
from tests.tiny import tiny_config, tiny_tensors, write_checkpoint


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def data(result: Any) -> dict[str, Any]:
    """Stdout must be one JSON object and nothing else."""
    return json.loads(result.stdout)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny model with its own trunk weights and a random head."""
    config = tiny_config()
    trunk = {name: tensor.bfloat16() for name, tensor in tiny_target().state_dict().items() if name != "lm_head.weight"}
    head = {name: tensor for name, tensor in tiny_tensors(config).items() if name.startswith("mtp.")}
    return write_checkpoint(tmp_path / "model", config, {**trunk, **head})


def prompts_file(folder: Path, *rows: object) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["list"], ["list", "--json"], ["train", "--help"], ["conform", "--help"]]
)
def test_light_commands_import_no_torch(arguments: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['mtp-zoo', *{arguments}]\n"
        "from mtp_zoo.cli import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "heavy = {'torch', 'transformers', 'datasets', 'matplotlib'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_list_shows_the_conventions_of_every_family() -> None:
    families = {row["name"]: row for row in data(run("list", "--json"))["families"]}
    assert families["qwen3_5"] == {
        "name": "qwen3_5",
        "model_types": ["qwen3_5", "qwen3_5_text"],
        "depth_policy": "recycled",
        "hidden_tap": "post_norm",
        "recycle": "post_norm",
        "fuse_order": "embed_hidden",
        "norm_weight": "zero_centered",
        "engines": {"vllm": "Qwen3_5MTP", "sglang": "Qwen3_5ForCausalLMMTP"},
    }
    assert families["glm4_moe"]["recycle"] == {"vllm": "pre_norm", "sglang": "post_norm", "train": "post_norm"}
    shown = run("list").stdout
    assert all(
        name in shown for name in (*families, "qwen3_5_text", "vllm: pre_norm", "sglang: Glm4MoeForCausalLMNextN")
    )


def test_inspect_of_a_whole_head(checkpoint: Path) -> None:
    result = run("inspect", checkpoint, "--json")
    assert result.exit_code == 0
    found = data(result)
    assert (found["family"], found["depths"], len(found["tensors"]), found["problems"]) == ("qwen3_5", 1, 15, [])
    assert "mtp.fc.weight" in run("inspect", checkpoint).stdout


def test_inspect_of_a_lost_head_fails_and_still_prints_one_object(tmp_path: Path) -> None:
    config = tiny_config()
    path = write_checkpoint(tmp_path / "model", config, tiny_tensors(config, head_depths=0))
    result = run("inspect", path, "--json")
    assert result.exit_code == 1
    assert data(result)["problems"]


def test_a_user_error_is_one_message_and_exit_code_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mtp-zoo", "inspect", str(tmp_path / "nothing"), "--json"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("SourceNotFoundError: ")
    assert "Remedy: " in captured.err


def test_eval_counts_and_checks_against_plain_decoding(checkpoint: Path, tmp_path: Path) -> None:
    rows = [{"input_ids": torch.randint(0, VOCAB, (6,)).tolist()} for _ in range(2)]
    arguments = (checkpoint, "--prompts", prompts_file(tmp_path, *rows), "-k", "2", "--max-new-tokens", "6", "--json")
    result = run("eval", *arguments)
    assert result.exit_code == 0, result.output
    found = data(result)
    assert found["lossless"] is True
    assert found["drafted"] == 2 * found["verify_steps"]
    assert found["tokens"] == found["accepted"] + found["verify_steps"]
    assert found["accept_length"] == found["tokens"] / found["verify_steps"]
    assert [depth["depth"] for depth in found["per_depth"]] == [1, 2]
    replayed = data(run("eval", *arguments, "--replay"))
    assert replayed["accepted"] == found["accepted"]
    assert replayed["lossless"] is None


def test_eval_renders_messages_with_the_models_own_template(checkpoint: Path, tmp_path: Path) -> None:
    words = {f"w{number}": number for number in range(VOCAB)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0")
    tokenizer.chat_template = (
        "{% for m in messages %}w9 {{ m.content }} {% endfor %}{% if add_generation_prompt %}w8{% endif %}"
    )
    tokenizer.save_pretrained(checkpoint)
    limits = ("-k", "2", "--max-new-tokens", "5", "--json")
    chat = prompts_file(tmp_path, {"messages": [{"role": "user", "content": "w5 w6"}]})
    by_chat = data(run("eval", checkpoint, "--prompts", chat, *limits))
    by_ids = data(run("eval", checkpoint, "--prompts", prompts_file(tmp_path, {"input_ids": [9, 5, 6, 8]}), *limits))
    assert by_chat == by_ids


def test_eval_for_people_says_whether_output_is_lossless(checkpoint: Path, tmp_path: Path) -> None:
    path = prompts_file(tmp_path, {"input_ids": [5, 6, 7]})
    shown = run("eval", checkpoint, "--prompts", path, "--max-new-tokens", "4").stdout
    assert "output equals plain greedy decoding: yes" in shown


@pytest.mark.parametrize(
    ("content", "piece"),
    [
        ("", "there are none"),
        ('{"text": "a"\n', "line 1: not JSON"),
        ('{"prompt": "a"}\n[1]\n', "line 2: expected an object"),
    ],
)
def test_prompts_that_can_not_be_used_are_refused(checkpoint: Path, tmp_path: Path, content: str, piece: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content, encoding="utf-8")
    result = run("eval", checkpoint, "--prompts", path)
    assert isinstance(result.exception, MTPZooError)
    assert piece in str(result.exception)


def test_missing_prompt_files_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    result = run("eval", checkpoint, "--prompts", tmp_path / "nothing.jsonl")
    assert isinstance(result.exception, MTPZooError)


def test_export_of_an_untouched_head_keeps_every_byte(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = data(run("export", checkpoint, out, "--json"))
    assert found["out"] == str(out)
    assert {"files_linked", "files_rewritten", "files_written", "bytes_written", "head_bytes"} <= found.keys()
    before = load_file(checkpoint / "model.safetensors")
    after = {name: t for file in out.glob("*.safetensors") for name, t in load_file(file).items()}
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_export_takes_the_head_of_another_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    config = tiny_config()
    donor = write_checkpoint(tmp_path / "donor", config, tiny_tensors(config, seed=7))
    run("export", checkpoint, tmp_path / "out", "--head", donor)
    heads = [
        {n: t for file in place.glob("*.safetensors") for n, t in load_file(file).items() if n.startswith("mtp.")}
        for place in (donor, tmp_path / "out")
    ]
    assert all(torch.equal(heads[1][name], tensor) for name, tensor in heads[0].items())


def test_export_refuses_an_output_that_exists(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    result = run("export", checkpoint, tmp_path / "out")
    assert isinstance(result.exception, MTPZooError)
    assert list((tmp_path / "out").iterdir()) == []
