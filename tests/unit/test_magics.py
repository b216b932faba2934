"""`%%vram` and `%vram` in a real IPython shell, and once in a real kernel."""
import re
import subprocess
import sys

import pytest
from IPython.core.interactiveshell import InteractiveShell
from jupyter_client.manager import start_new_kernel
from traitlets.config import Config

MiB = 2**20


@pytest.fixture
def shell():
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"hist_file": ":memory:"}}))
    shell.run_line_magic("load_ext", "grpo_lab")
    shell.run_cell("import torch")
    yield shell
    InteractiveShell.clear_instance()


def run(shell, capsys, code: str):
    """(result, standard output, standard error) of a cell."""
    capsys.readouterr()
    result = shell.run_cell(code, store_history=True)
    return result, *(re.sub(r"\x1b\[[\d;]*m", "", text) for text in capsys.readouterr())


def test_a_cell_on_this_machine(shell, capsys):
    result, out, err = run(shell, capsys, "%%vram -o report\nx = torch.zeros(1024, 1024)\nx.shape[0]")
    assert result.success and err == ""
    assert "measured on this machine: peak" in out
    assert result.result == 1024                                    # the last expression, as ever
    assert shell.user_ns["x"].shape == (1024, 1024)                 # really run
    assert "vram" not in shell.user_ns                              # the instrument is there inside only
    assert 4 * MiB <= shell.user_ns["report"].peak_allocated


def test_what_was_there_before_is_counted(shell, capsys):
    run(shell, capsys, "weights = torch.zeros(1024, 1024)")
    run(shell, capsys, "%%vram -o report\ny = weights + 1")
    assert shell.user_ns["report"].phases.loc["before", "peak_allocated"] >= 4 * MiB
    assert shell.user_ns["report"].peak_allocated >= 8 * MiB


@pytest.mark.parametrize("quoted", ['--gpu "RTX 3080 Laptop 8GB"', "--gpu 'rtx 3080 laptop 8gb'", "--gpu=8GB",
                                    '--gpu="RTX 3080 Laptop 8GB"', f"--gpu {8 * 2**30}"])
def test_a_cell_on_a_card_that_is_not_there(shell, capsys, quoted):
    code = ("with vram.phase('forward'):\n    x = torch.zeros(2**30, device='cuda')\n"
            "with vram.phase('backward'):\n    y = x[:1] + 1")
    result, out, err = run(shell, capsys, f"%%vram {quoted} -o report --phases --top 3\n{code}")
    assert result.success and err == ""
    assert "simulated on" in out and "fits" in out
    report = shell.user_ns["report"]
    assert list(report.phases.index) == ["forward", "backward"]
    assert report.peak_allocated == 4096 * MiB + 512
    assert "peak_reserved" in out                                   # --phases
    assert "Cell In[1]:3" in out                                    # --top: the line, counted from the magic's own
    assert "x" not in shell.user_ns and "y" not in shell.user_ns    # nothing fake is left behind


def test_a_variable_as_the_card(shell, capsys):
    run(shell, capsys, "card = 'RTX 3080 Laptop 16GB'")
    result, out, err = run(shell, capsys, '%%vram --gpu "$card"\n1;')
    assert result.success and "simulated on RTX 3080 Laptop 16GB" in out


def test_it_reports_also_when_the_cell_raises(shell, capsys):
    result, out, err = run(shell, capsys, "%%vram -o report\nbig = torch.zeros(1024, 1024)\n\n1 / 0")
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    assert shell.user_ns["report"].peak_allocated >= 4 * MiB
    assert out.index("measured on this machine") < out.index("ZeroDivisionError")
    assert "----> 4 1 / 0" in out                                   # the cell's own line number, its own frame ...
    assert "magics.py" not in out and "run_cell_magic" not in out   # ... and nothing of the magic


def test_out_of_memory_on_the_card(shell, capsys):
    code = "def grow():\n    return [torch.empty(2**30) for _ in range(3)]\n\ngrow()"
    result, out, err = run(shell, capsys, f'%%vram --gpu "RTX 3080 Laptop 8GB" -o report\n{code}')
    assert type(result.error_in_exec).__name__ == "OutOfMemoryError"
    assert out.index("does not fit: aten.empty") < out.index("Tried to allocate 4.00 GiB. GPU 0 has a total capacity")
    assert not shell.user_ns["report"].fits
    assert "----> 5 grow()" in out


def test_a_line(shell, capsys):
    run(shell, capsys, "c = 7")
    result, out, err = run(shell, capsys, '%vram -o report x = {"a  b": torch.zeros(1024, 1024), "c": "--gpu  {c}"}')
    assert result.success and "measured on this machine" in out
    assert list(shell.user_ns["x"]) == ["a  b", "c"]                # blanks and quotes as written
    assert shell.user_ns["x"]["c"] == "--gpu  {c}"
    result, out, err = run(shell, capsys, "%vram --gpu T4 torch.zeros(3)  # don't")
    assert result.success and result.result.shape == (3,)


def test_other_magics_and_semicolons_inside(shell, capsys):
    result, out, err = run(shell, capsys, "%%vram\n%time y = torch.ones(3)\ny;")
    assert result.success and "Wall time" in out
    assert "tensor([1" not in out                                   # the semicolon


@pytest.mark.parametrize("code, sentence", [
    ("%%vram --gpu \"RTX 3080 Labtop\"\n1", "gpu='RTX 3080 Labtop' is not a card that grpo_lab knows; did you mean"),
    ("%%vram --gpu RTX 3080 Laptop 8GB\n1", "'3080 Laptop 8GB' is no option; the code goes below, a card's name with"),
    ("%%vram --gpu 1000\n1", "a budget is counted in bytes and at least 64 MiB"),
    ("%%vram --top many\n1", "argument --top: invalid int value: 'many'"),
    ("%%vram --top 0\n1", "--top 0: takes a number from 1 on"),
    ("%%vram -o a.b\n1", "-o a.b is no name of a variable"),
    ("%vram --gpu T4", "there is nothing to run"),
])
def test_mistakes_get_one_sentence(shell, capsys, code, sentence):
    result, out, err = run(shell, capsys, code)
    assert not result.success
    said = (out + err).strip()
    assert said.startswith("UsageError: ") and sentence in said
    assert len(said.splitlines()) == 1


def test_a_typo_in_the_code_is_a_syntax_error(shell, capsys):
    result, out, err = run(shell, capsys, "%%vram\nx = = 1")
    assert not result.success
    assert "SyntaxError" in out + err and "measured" not in out


def test_help(shell, capsys):
    result, out, err = run(shell, capsys, "%vram -h")
    assert result.success and "--gpu CARD" in out and "-o NAME" in out
    assert "Report what a cell (%%vram) or a statement (%vram) does with memory." in out
    shown = shell.object_inspect_text("%vram")
    assert "--gpu CARD" in shown and "name parts of the" in " ".join(shown.split())


def test_a_variable_called_vram_survives(shell, capsys):
    run(shell, capsys, "vram = 5")
    run(shell, capsys, "%%vram\nkind = type(vram).__name__")
    assert (shell.user_ns["vram"], shell.user_ns["kind"]) == (5, "track")


def test_importing_the_package_still_imports_no_torch():
    code = "import sys, grpo_lab; assert 'torch' not in sys.modules and 'IPython' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_in_a_real_kernel():
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        def said(code: str):
            messages = []
            reply = client.execute_interactive(code, timeout=120, output_hook=messages.append)
            return reply["content"], [(m["msg_type"], m["content"]) for m in messages
                                      if m["msg_type"] not in ("status", "execute_input")]

        said("%load_ext grpo_lab\nimport torch")
        reply, messages = said('%%vram --gpu "RTX 3080 Laptop 8GB" --top 3\nx = torch.empty(2**30)\ny = x + x\n')
        assert reply["status"] == "error"                           # "Run all" stops here, as without the magic
        assert reply["ename"] == "OutOfMemoryError"
        kinds = [kind for kind, _ in messages]
        assert kinds == ["display_data", "display_data", "error"]
        assert "does not fit" in messages[0][1]["data"]["text/html"]
        assert "Cell In[2]:2" in messages[1][1]["data"]["text/plain"]
        trace = "\n".join(messages[2][1]["traceback"])
        assert "magics.py" not in trace and "Cell" in trace
        reply, messages = said("%vram torch.ones(2)")
        assert [kind for kind, _ in messages] == ["display_data", "execute_result"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
