"""Problems and reward functions: the stored files, the checker, and what is said to a bad reward function."""

import functools
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab import tasks
from grpo_lab._data import data_path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def script(name):
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def chat(text):
    return [{"role": "assistant", "content": text}]


# --- problems -----------------------------------------------------------------------------------------------


def test_the_script_reproduces_the_stored_problems_byte_for_byte():
    files = script("make_problems").files()
    assert len(files) == 6
    for name, text in files.items():
        assert data_path("problems", name).read_bytes() == text.encode(), (
            f"{name}: run scripts/make_problems.py"
        )


def as_seen_by_a_reader(row):
    """The same for problems that differ in the order of their numbers only."""
    if "numbers" in row:
        return (*sorted(row["numbers"]), row["target"])
    return tuple(sorted(row["prompt"].rstrip("=").split("+")))


@pytest.mark.parametrize(("name", "sizes"), [("addition", (2000, 250, 250)), ("countdown", (1000, 100, 100))])
def test_splits_share_no_problem_not_even_turned_round(name, sizes):
    splits = [tasks.get(name).prompts(split) for split in tasks.SPLITS]
    assert tuple(map(len, splits)) == sizes
    train, validation, test = ({as_seen_by_a_reader(row) for row in rows} for rows in splits)
    assert not train & validation and not train & test and not validation & test
    prompts = [row["prompt"] for rows in splits for row in rows]
    assert len(set(prompts)) == len(prompts)


@pytest.mark.parametrize("name", tasks.names())
@pytest.mark.parametrize("form", [str, chat], ids=["text", "chat"])
def test_every_stored_answer_is_rewarded_and_its_neighbours_is_not(name, form):
    task = tasks.get(name)
    for split in tasks.SPLITS:
        rows = task.prompts(split)
        columns = {key: [row[key] for row in rows] for key in rows[0] if key != "prompt"}
        right = [form(answer) for answer in columns["answer"]]
        wrong = [form(answer + "+1") for answer in columns["answer"]]
        for func in task.reward_funcs:
            assert func(completions=right, **columns) == [1.0] * len(rows)
            assert func(completions=wrong, **columns) == [0.0] * len(rows)


def test_additions_are_right():
    for row in tasks.get("addition").prompts("train"):
        a, b = map(int, row["prompt"].rstrip("=").split("+"))
        assert row["answer"] == str(a + b) and 0 <= a < 50 and 0 <= b < 50


def test_prompts_are_the_callers_own():
    """A notebook that edited a problem would otherwise edit it for every later cell."""
    tasks.get("countdown").prompts("test")[0]["numbers"].append(99)
    assert 99 not in tasks.get("countdown").prompts("test")[0]["numbers"]


@pytest.mark.parametrize("name", ["adition", "Countdown", "chess", "", None, 3])
def test_unknown_task_lists_the_tasks(name):
    with pytest.raises(ValueError, match="does not exist; .*addition, countdown") as caught:
        tasks.get(name)
    assert repr(name) in str(caught.value)


def test_unknown_task_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'countdown'"):
        tasks.get("count-down")


def test_unknown_split():
    with pytest.raises(
        ValueError, match="split='dev' of task 'addition' does not exist; use one of train, validation, test"
    ):
        tasks.get("addition").prompts("dev")


# --- the checker of countdown -------------------------------------------------------------------------------

expressions = st.recursive(
    st.integers(0, 50).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(
        lambda parts: "(" + "".join(parts) + ")"
    ),
    max_leaves=5,
)


@settings(deadline=None)  # a busy machine is not a mistake of ours
@given(expressions)
def test_evaluate_agrees_with_python(text):
    value, used = tasks.evaluate(text)
    assert value == eval(text)
    assert sorted(map(str, used)) == sorted(text.translate(str.maketrans("+-*()", "     ")).split())


garbage = st.one_of(
    st.text(),
    st.text("0123456789+-*()= _.,eEjx"),
    expressions,
    st.none(),
    st.integers(),
    st.lists(st.dictionaries(st.sampled_from(["role", "content"]), st.one_of(st.text(), st.none()))),
)


@settings(deadline=None)
@given(garbage)
def test_rewards_never_raise_on_garbage(completion):
    for value in (
        *tasks.reaches_target([completion], numbers=[[3, 5, 7]], target=[56]),
        *tasks.exact_match([completion], answer=["56"]),
    ):
        assert value in (0.0, 1.0)


@pytest.mark.parametrize(
    "text",
    [
        "8*7",
        "(3+5)*7*7",
        "(3+5)*7+0",
        "(3+5)*7=57",
        "(3+5)*7=",
        "3+5*7",
        "(3+5)*7;",
        "-(-(3+5))*7",
        "(3+5)*7.0",
        "(3+5)7",
        "((3+5)*7",
        "(3 + 5) * 7 # yes",
        "(0x3+5)*7",
        "(3+5)*7 if 1 else 0",
        "",
        "=",
        "56",
        "9**9**9**9",
        "(" * 90,
        "(" * 100_000,
        "1+" * 50_000 + "1",
        "__import__('os').getcwd()",
        "(3+5)*7==56",
        "(3+5)*(7)=56=56",
        "(３+5)*7",
        "(3_0+5)*7",
    ],
)
def test_not_an_answer(text):
    assert tasks.reaches_target([text], numbers=[[3, 5, 7]], target=[56]) == [0.0]


@pytest.mark.parametrize(
    "text", ["(3+5)*7", " (3 + 5) * 7 ", "7*(5+3)", "(3+5)*7=56", "(3+5)*7 = 56", "((3+5))*(7)"]
)
def test_an_answer(text):
    assert tasks.reaches_target([text], numbers=[[3, 5, 7]], target=[56]) == [1.0]


def test_each_number_counts_once_also_when_it_is_given_twice():
    assert tasks.reaches_target(["4*4+1", "4*4", "4+1"], numbers=[[4, 1, 4]] * 3, target=[17, 16, 5]) == [
        1.0,
        0.0,
        0.0,
    ]


# --- call_rewards -------------------------------------------------------------------------------------------

PROMPTS, COMPLETIONS, COLUMNS = ["1+1=", "2+2="], ["2", "5"], {"answer": ["2", "4"]}


def call(*funcs, columns=COLUMNS):
    return tasks.call_rewards(list(funcs), PROMPTS, COMPLETIONS, columns)


def short(completions, **_):
    return [0.5 * (len(c) == 1) for c in completions]


def test_rewards_add_up():
    assert call(tasks.exact_match, short) == [1.5, 0.5]
    assert tasks.call_rewards(tasks.exact_match, PROMPTS, COMPLETIONS, COLUMNS) == [1.0, 0.0]


def test_functions_get_prompts_completions_and_every_column():
    def see(prompts, completions, answer, difficulty):
        assert (prompts, completions, answer, difficulty) == (PROMPTS, COMPLETIONS, COLUMNS["answer"], [1, 2])
        return [0, 0]

    assert call(see, columns=COLUMNS | {"difficulty": [1, 2]}) == [0.0, 0.0]


@pytest.mark.parametrize(
    "values",
    [
        [1, 0],
        (True, False),
        torch.tensor([1.0, 0.0]),
        torch.tensor([1.0, 0.0]).numpy(),
        [torch.tensor(1.0), torch.tensor(0)],
        iter([1, 0]),
    ],
    ids=lambda v: type(v).__name__,
)
def test_any_kind_of_numbers(values):
    result = call(lambda **_: values)
    assert result == [1.0, 0.0] and all(type(value) is float for value in result)


def test_none_means_not_applicable_as_in_trl():
    def only_the_first(completions, **_):
        return [2.0, None]

    assert call(only_the_first, short) == [2.5, 0.5]
    first, second = call(only_the_first)
    assert first == 2.0 and second != second  # nobody judged it: NaN, as TRL has it


def broken(completions, gold, **_):
    return [float(c == g) for c, g in zip(completions, gold, strict=True)]


def test_a_function_that_raises_is_named_and_its_error_kept():
    with pytest.raises(
        ValueError,
        match=r"reward function 'broken' raised TypeError: .*gold.*keywords prompts, "
        r"completions, answer and must return one number per completion",
    ) as caught:
        call(short, broken)
    assert isinstance(caught.value.__cause__, TypeError)


def test_partials_and_callable_objects_have_a_name():
    class Judge:
        def __call__(self, **_):
            return []

    for func, name in ((functools.partial(broken, gold=None), "broken"), (Judge(), "Judge")):
        with pytest.raises(ValueError, match=f"reward function '{name}'"):
            call(func)


async def slow(completions, **_):
    return [1.0, 1.0]


@pytest.mark.parametrize(
    ("func", "message"),
    [
        (lambda **_: [1.0], "returned 1 value for 2 completions; expected one number per completion"),
        (lambda **_: [1.0, 2.0, 3.0], "returned 3 values for 2 completions"),
        (lambda **_: [], "returned 0 values for 2 completions"),
        (lambda **_: 1.0, r"returned 1.0 \(float\); expected a list of 2 numbers, one per completion"),
        (lambda **_: torch.tensor(1.0), "returned 1 value for 2 completions"),
        (lambda **_: None, r"returned None \(NoneType\); expected a list of 2 numbers"),
        (lambda **_: "ok", r"returned 'ok' \(str\); expected a list of 2 numbers"),
        (lambda **_: {0: 1.0, 1: 0.0}, r"\(dict\); expected a list of 2 numbers"),
        (lambda **_: [1.0, float("nan")], "returned nan for completion 1; expected a finite number"),
        (lambda **_: [float("-inf"), 1.0], "returned -inf for completion 0; expected a finite number"),
        (lambda **_: [torch.tensor(float("nan")), 1.0], "returned nan for completion 0"),
        (lambda **_: [1.0, "1"], r"returned '1' \(str\) for completion 1; expected a number, or None"),
        (lambda **_: [1.0, [1.0]], r"returned \[1.0\] \(list\) for completion 1; expected a number"),
        (lambda **_: [1.0, 1j], r"returned 1j \(complex\) for completion 1; expected a number"),
        (lambda **_: [10**400, 1.0], "for completion 0; expected a number"),
        (slow, "is asynchronous; give an ordinary function"),
    ],
)
def test_a_bad_return_is_one_sentence_that_names_the_function(func, message):
    if func is not slow:
        func.__name__ = "judge"
    with pytest.raises(ValueError, match=f"^reward function '{func.__name__}' .*{message}") as caught:
        call(short, func)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_not_a_function():
    with pytest.raises(TypeError, match="reward_funcs contains 'accuracy', which is not a function"):
        call("accuracy")
    with pytest.raises(ValueError, match="reward_funcs is empty"):
        call()


def test_running_out_of_memory_is_not_the_functions_mistake():
    """`oom_guard` around a run with a reward model must see the OutOfMemoryError itself."""

    def reward_model(**_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    with pytest.raises(torch.OutOfMemoryError):
        call(reward_model)


# --- TRL ----------------------------------------------------------------------------------------------------


def in_chat_form(rows):
    return [row | {"prompt": [{"role": "user", "content": row["prompt"].rstrip("=")}]} for row in rows]


@pytest.mark.parametrize("name", tasks.names())
@pytest.mark.parametrize("form", ["text", "chat"])
def test_trl_takes_the_problems_and_rewards_unchanged(name, form, tmp_path):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rows = tasks.get(name).prompts("train")[:8]
    seen = []

    @functools.wraps(tasks.get(name).reward_funcs[0])
    def spy(**keywords):
        seen.append((keywords["completions"], tasks.get(name).reward_funcs[0](**keywords)))
        return seen[-1][1]

    trainer = GRPOTrainer(
        str(data_path("tiny")),
        reward_funcs=[spy],
        train_dataset=Dataset.from_list(in_chat_form(rows) if form == "chat" else rows),
        args=GRPOConfig(
            str(tmp_path),
            per_device_train_batch_size=32,
            num_generations=4,
            max_completion_length=4,
            max_steps=2,
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            seed=1,
        ),
    )
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert len(rewards) == 2 and len(seen) == 2
    for logged, (completions, values) in zip(rewards, seen, strict=True):
        assert logged == pytest.approx(sum(values) / 32)
        assert all(isinstance(completion, str if form == "text" else list) for completion in completions)
    if name == "addition":  # the warmed-up model gets some of 32 answers right, in both forms
        assert sum(rewards) > 0


def test_a_problem_file_is_readable_by_datasets():
    from datasets import Dataset

    rows = [
        json.loads(line) for line in data_path("problems", "countdown", "test.jsonl").read_text().splitlines()
    ]
    assert Dataset.from_list(rows)[0] == tasks.get("countdown").prompts("test")[0]
