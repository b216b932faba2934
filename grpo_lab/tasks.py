"""Problems and reward functions.

A reward function has TRL's signature: it is called with keywords, `prompts`, `completions` and one list per
further column of the problems, and returns one number per completion (None where it does not apply).
Completions are strings, or lists of chat messages where the prompts are.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._data import data_path
from ._names import did_you_mean

RewardFunc = Callable[..., "list[float | None]"]
SPLITS = ("train", "validation", "test")
LONGEST_EXPRESSION = (
    100  # characters; three numbers with operators need far fewer, a parser's stack is finite
)
_EXPRESSION = re.compile(r"[0-9+*() -]+")


@dataclass(frozen=True)
class Task:
    """Problems in three splits, and the rewards for answering them.

    >>> task = get("addition")
    >>> task.prompts("train")[0].keys()
    dict_keys(['prompt', 'answer'])
    >>> task.reward_funcs[0](completions=["42", "43"], answer=["42", "42"])
    [1.0, 0.0]
    """

    name: str
    description: str
    reward_funcs: list[RewardFunc]

    def prompts(self, split: str = "train") -> list[dict[str, Any]]:
        """Return the problems of "train", "validation" or "test": one dict each, the columns of TRL.

        >>> get("countdown").prompts("test")[0]
        {'prompt': 'make 14 from 2, 9, 3=', 'answer': '9+2+3', 'numbers': [2, 9, 3], 'target': 14}
        """
        if split not in SPLITS:
            raise ValueError(
                f"split={split!r} of task {self.name!r} does not exist; use one of {', '.join(SPLITS)}"
            )
        return [json.loads(line) for line in _lines(self.name, split)]


@functools.cache
def _lines(task: str, split: str) -> tuple[str, ...]:
    return tuple(data_path("problems", task, f"{split}.jsonl").read_text(encoding="utf-8").splitlines())


def names() -> list[str]:
    """Return the names of the tasks.

    >>> names()
    ['addition', 'countdown']
    """
    return list(_TASKS)


def get(name: str) -> Task:
    """Return a task by its name.

    >>> get("adition")
    Traceback (most recent call last):
    ...
    ValueError: task 'adition' does not exist; did you mean 'addition'? Tasks: addition, countdown
    """
    if name not in _TASKS:
        hint = did_you_mean(name, _TASKS)
        hint = "" if hint.startswith("known") else hint + " "
        raise ValueError(f"task {name!r} does not exist; {hint}Tasks: {', '.join(_TASKS)}")
    return _TASKS[name]


def text_of(completion: Any) -> str:
    """Return the text of a completion: a string, or a list of chat messages whose contents are joined.

    >>> text_of([{"role": "assistant", "content": "42"}])
    '42'

    Anything else is no answer, and gives "".
    """
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, (list, tuple)):
        return ""
    contents = [message.get("content") for message in completion if isinstance(message, Mapping)]
    return "".join(content for content in contents if isinstance(content, str))


def exact_match(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """Reward 1 for the answer and nothing else (white space at the ends aside), 0 for anything else.

    >>> exact_match(["42", " 42 ", "42!"], answer=["42", "42", "42"])
    [1.0, 1.0, 0.0]
    """
    return [float(text_of(c).strip() == str(a).strip()) for c, a in zip(completions, answer, strict=True)]


def reaches_target(
    completions: Sequence[Any], numbers: Sequence[Sequence[int]], target: Sequence[int], **_: Any
) -> list[float]:
    """Reward 1 for an expression of +, - and * that uses each number once and gives the target, else 0.

    >>> reaches_target(["(3+5)*7", "(3+5)*7=56", "8*7", "7*8"], numbers=[[3, 5, 7]] * 4, target=[56] * 4)
    [1.0, 1.0, 0.0, 0.0]

    A trailing `= target` is allowed. Text that is no such expression gets 0 and never raises.
    """
    return [float(_reaches(text_of(c), n, t)) for c, n, t in zip(completions, numbers, target, strict=True)]


def _reaches(text: str, numbers: Sequence[int], target: int) -> bool:
    expression, equals, claimed = text.strip().partition("=")
    if equals and claimed.strip() != str(target):
        return False
    result = evaluate(expression)
    return result is not None and result[0] == target and sorted(result[1]) == sorted(numbers)


def evaluate(expression: str) -> tuple[int, list[int]] | None:
    """Return the value of an expression of whole numbers, +, - and *, and its numbers; None for other text.

    >>> evaluate("(3+5)*7")
    (56, [3, 5, 7])
    >>> evaluate("2**9") is None, evaluate("__import__('os')") is None
    (True, True)

    The text is parsed and walked, never executed.
    """
    expression = expression.strip()
    if len(expression) > LONGEST_EXPRESSION or not _EXPRESSION.fullmatch(expression):
        return None
    used: list[int] = []
    try:
        return _value(ast.parse(expression, mode="eval").body, used), used
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, used: list[int]) -> int:
    match node:
        case ast.Constant(value=int(value)):
            used.append(value)
            return value
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() as op, right=right):
            a, b = _value(left, used), _value(right, used)
            return a + b if isinstance(op, ast.Add) else a - b if isinstance(op, ast.Sub) else a * b
    raise ValueError("neither a whole number nor +, -, *")


def call_rewards(
    reward_funcs: Sequence[RewardFunc] | RewardFunc,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
) -> list[float]:
    """Call every reward function as TRL does and return their sum for each completion.

    >>> call_rewards([exact_match], ["40+2=", "40+2="], ["42", "7"], {"answer": ["42", "42"]})
    [1.0, 0.0]

    None from a function means that it does not judge that completion and counts as 0; a completion that no
    function judges gets NaN, and no part in learning, as in TRL. ValueError, naming the function, where one
    raises or returns something else than one finite number per completion.
    """
    funcs = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
    if not funcs:
        raise ValueError(
            "reward_funcs is empty: give at least one function f(completions, **columns) -> list of numbers"
        )
    table = [_call(func, prompts, completions, columns) for func in funcs]
    judged = [[value for value in row if value is not None] for row in zip(*table, strict=True)]
    return [sum(values) if values else math.nan for values in judged]


def _call(func: RewardFunc, prompts, completions, columns) -> list[float | None]:
    if not callable(func):
        raise TypeError(
            f"reward_funcs contains {func!r}, which is not a function: give f(completions, **columns) -> list"
        )
    name = _name(func)
    try:
        output = func(prompts=prompts, completions=completions, **columns)
    except Exception as error:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            raise  # not the function's mistake; whoever guards against running out of memory wants to see it
        called_with = ", ".join(["prompts", "completions", *columns])
        raise ValueError(
            f"reward function {name!r} raised {type(error).__name__}: {error}; it is called with the "
            f"keywords {called_with} and must return one number per completion"
        ) from error
    if inspect.iscoroutine(output):
        output.close()
        raise ValueError(
            f"reward function {name!r} is asynchronous; give an ordinary function that returns a list"
        )
    if isinstance(output, (str, bytes, Mapping)) or not hasattr(output, "__iter__"):
        raise ValueError(
            f"reward function {name!r} returned {_shown(output)}; expected a list of {len(completions)} "
            "numbers, one per completion"
        )
    try:
        values = list(output)
    except TypeError:  # a tensor without dimensions has __iter__ but no elements
        values = [output]
    if len(values) != len(completions):
        raise ValueError(
            f"reward function {name!r} returned {len(values)} value{'s' * (len(values) != 1)} for "
            f"{len(completions)} completions; expected one number per completion"
        )
    return [_number(value, name, index) for index, value in enumerate(values)]


def _number(value: Any, name: str, index: int) -> float | None:
    if value is None:
        return None
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        number = float(value)  # also numpy's and torch's scalars
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(
            f"reward function {name!r} returned {_shown(value)} for completion {index}; "
            "expected a number, or None where it does not apply"
        ) from None
    if not math.isfinite(number):
        raise ValueError(
            f"reward function {name!r} returned {number} for completion {index}; expected a finite number, "
            "or None where it does not apply"
        )
    return number


def _name(func: Any) -> str:
    while isinstance(func, functools.partial):
        func = func.func
    return getattr(func, "__name__", type(func).__name__)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


_TASKS = {
    task.name: task
    for task in (
        Task("addition", "a+b= with a and b from 0 to 49", [exact_match]),
        Task(
            "countdown",
            "make a target from three numbers with +, - and *, each number once",
            [reaches_target],
        ),
    )
}
