"""The command line, mostly in this process; exit codes, JSON, and what a shell expects."""

import io
import json
import os
import subprocess
import sys

import pytest

from grpo_lab import Recipe, estimate, gpus, models
from grpo_lab.cli import COMMANDS, main

OOM = "CUDA out of memory. Tried to allocate 1.20 GiB. GPU 0 has a total capacity of 15.73 GiB of which 0.31 GiB is free."


def test_estimate_says_what_the_function_says_and_the_exit_code_is_the_verdict(capsys):
    assert main(["estimate", "--preset", "laptop_8gb", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["peak_allocated"] == estimate(Recipe.preset("laptop_8gb")).peak_allocated and found["fits"] is True
    assert main(["estimate", "--model", "Qwen2.5-1.5B"]) == 1                     # the baseline with that model
    out = capsys.readouterr().out
    assert "does not fit" in out and "backward" in out
    assert main(["estimate", "--preset", "laptop_8gb", "--explain"]) == 0
    assert " x 1,536 x " in capsys.readouterr().out


def test_options_are_the_fields_in_either_spelling_and_none_is_none(capsys):
    options = ["--max-completion-length", "300", "--max_prompt_length", "1_00", "--lora-rank", "none", "--autocast", "none",
               "--activation-checkpointing", "no", "--beta", "0.0", "--gpu", str(12 * 2**30), "--lora-targets", "q_proj,v_proj"]
    assert main(["estimate", "--preset", "laptop_8gb", "--json", *options]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    same = Recipe.preset("laptop_8gb", max_completion_length=300, max_prompt_length=100, lora_rank=None, gpu=12 * 2**30,
                         activation_checkpointing=False, lora_targets=("q_proj", "v_proj"))
    assert found["peak_allocated"] == estimate(same).peak_allocated and found["budget"] == 12 * 2**30


def test_simulate(capsys):
    arguments = ["--model", "SmolLM2-135M", "--preset", "laptop_8gb", "--max-completion-length", "32", "--gpu", "T4",
                 "--dtype", "float32"]
    assert main(["simulate", *arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["simulated"] is True


def test_advise_from_the_baseline_prints_a_fitting_recipe(capsys):
    assert main(["advise", "--model", "Qwen2.5-1.5B", "--gpu", "RTX 3080 Laptop 16GB", "--no-verify", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and estimate(Recipe(**found["recipe"])).fits and found["changes"][0]["change"] == "chunked logits"
    assert main(["advise", "--model", "Qwen2.5-14B", "--gpu", str(2**28), "--no-verify"]) == 1
    assert "nothing that was tried" in capsys.readouterr().out


def test_diagnose_reads_a_file_an_argument_and_standard_input(capsys, tmp_path, monkeypatch):
    path = tmp_path / "error.txt"
    path.write_text(f"Traceback\n{OOM}")
    for arguments in ([str(path)], [OOM]):
        assert main(["diagnose", *arguments, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["numbers"]["requested"] == round(1.2 * 2**30)
    monkeypatch.setattr("sys.stdin", path.open())
    assert main(["diagnose", "--model", "Llama-3.2-1B"]) == 0
    assert "1.20 GiB were asked for" in capsys.readouterr().out


def test_lists(capsys):
    for command, names in (("cards", gpus.names()), ("models", models.names())):
        assert main([command]) == 0
        out = capsys.readouterr().out
        assert all(name in out for name in names)
        assert main([command, "--json"]) == 0
        assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == names


def test_train_writes_its_history_whole_or_not_at_all(capsys, tmp_path, monkeypatch):
    out = tmp_path / "history.csv"
    assert main(["train", "--max-steps", "2", "--out", str(out)]) == 0
    assert len(out.read_text().splitlines()) == 3 and list(tmp_path.iterdir()) == [out]
    assert "reward" in capsys.readouterr().out
    before = out.read_text()

    def fails(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr("os.replace", fails)
    assert main(["train", "--max-steps", "1", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert out.read_text() == before and "No space left" in error
    assert len(tmp_path.joinpath("history.csv.part").read_text().splitlines()) == 2 and "history.csv.part" in error


def test_a_folder_for_the_history_is_refused_before_training(capsys, tmp_path):
    """The refusal came after the last step, and what had been trained was lost."""
    assert main(["train", "--max-steps", "1", "--out", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert "this is a folder" in captured.err and "step" not in captured.err and list(tmp_path.iterdir()) == []


def test_train_says_its_cost_beforehand_and_prints_nothing_but_the_result(capsys):
    """The line on the cost came out on standard output, in front of the JSON, which no program could read then."""
    assert main(["train", "--max-steps", "2", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["steps"] == 2 and found["last"]["step"] == 2
    assert captured.err.index("2 steps on 1 batches of 512 completions") < captured.err.rindex("reward")


@pytest.mark.parametrize("arguments, words", [
    (["estimate", "--model", "Qwen2.5-99B"], "did you mean"),
    (["estimate", "--gpu", "RTX 3099"], "not a card"),
    (["estimate", "--gpu=-8GB"], "positive number"),
    (["estimate", "--max-completion-length", "-4"], "at least 1"),
    (["estimate", "--max-completion-length", "3.5"], "takes a whole number"),
    (["estimate", "--beta", "much"], "takes a number"),
    (["estimate", "--activation-checkpointing", "maybe"], "takes true or false"),
    (["estimate", "--dtype", "fp8"], "not one of"),
    (["estimate", "--activation-offload", "true"], "activation_checkpointing=True as well"),
    (["diagnose", ""], "the text is empty"),
    (["diagnose", "no-such-file.txt"], "there is no file 'no-such-file.txt'"),
    (["train", "--out", "/no/such/folder/history.csv"], "there is no folder"),
    ([], "are required: command"),
    (["no-such-command"], "'estimate', 'simulate'"),
    (["estimate", "--lora-rnk", "4"], "there is no option --lora-rnk; did you mean --lora-rank?"),
    (["cards", "--lora-rank=4"], "there is no option --lora-rank "),
    (["estimate", "--gpu"], "expected one argument"),
    (["estimate", "--preset", "laptop"], "'laptop_16gb'"),
])  # fmt: skip
def test_what_can_t_be_understood_is_one_sentence_and_exit_code_2(arguments, words, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err and len(captured.err.splitlines()) == 1 and "Traceback" not in captured.err


def test_help_names_every_command_and_every_field(capsys):
    for arguments, words in ((["--help"], COMMANDS), (["estimate", "--help"], ["--max-completion-length", "--lora-rank"])):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        out = capsys.readouterr().out
        assert stop.value.code == 0 and all(word in out for word in words)


@pytest.mark.parametrize("arguments, code", [(["diagnose", OOM], 0), (["diagnose", *OOM.split()], 0),
                                             (["diagnose", "loss is nan"], 1)])  # fmt: skip
def test_diagnose_answers_a_shell_s_if(arguments, code, capsys):
    """As grep does: 0 where there is something, 1 where there is nothing; the words may come without quotes."""
    assert main(arguments) == code
    assert main([*arguments, "--json"]) == code
    assert ("1.20 GiB were asked for" in capsys.readouterr().out) is (code == 0)


def test_a_dash_is_standard_input_and_a_person_is_told_to_paste(capsys, monkeypatch):
    for terminal in (False, True):
        stdin = io.StringIO(OOM)
        stdin.isatty = lambda terminal=terminal: terminal
        monkeypatch.setattr("sys.stdin", stdin)
        assert main(["diagnose", "-"]) == 0
        assert ("paste the message" in capsys.readouterr().err) is terminal


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS, "cards", (interrupted, "", False))
    assert main(["cards"]) == 130
    assert capsys.readouterr().err == "grpo-lab: interrupted\n"


@pytest.mark.parametrize("arguments", [["cards"], ["models"], ["estimate"], ["diagnose", OOM, "--preset", "baseline"],
                                       ["advise", "--no-verify"]])  # fmt: skip
def test_what_needs_no_torch_starts_without_it(arguments):
    code = f"import sys; from grpo_lab.cli import main; main({arguments!r}); print('torch' in sys.modules, file=sys.stderr)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stderr.strip() == "False"


@pytest.mark.parametrize("arguments", [["models"], ["cards", "--json"], ["estimate"]])
def test_a_broken_pipe_is_quiet(arguments):
    """`| head`: the reader is gone before the first line is written, so nothing depends on who is faster."""
    reading, writing = os.pipe()
    os.close(reading)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    out = subprocess.run([sys.executable, "-m", "grpo_lab", *arguments], stdout=writing, stderr=subprocess.PIPE, text=True,
                         env=buffered)
    os.close(writing)
    assert out.stderr == "" and out.returncode == 0
