"""Reward functions that tests name as `tiny_rewards:function`."""


def low_bytes(completions, **kwargs):
    """The share of characters of a completion that are plain ASCII: something to learn from random weights."""
    return [sum(character.isascii() for character in text) / max(len(text), 1) for text in completions]


def constant(completions):
    """The same for every completion."""
    return [0.5 for _ in completions]


def right(completions, answer):
    """1 for exactly the answer."""
    return [float(text == truth) for text, truth in zip(completions, answer, strict=True)]


def ended(finished):
    """1 for a completion that ended itself."""
    return [float(value) for value in finished]


def length(completion_ids):
    """The number of tokens, the end of turn included."""
    return [len(ids) for ids in completion_ids]


def only_odd(prompts, completions):
    """Applies to every other row."""
    return [1.0 if row % 2 else None for row in range(len(prompts))]


def nothing(completions):
    """Applies to no row."""
    return [None for _ in completions]


def not_a_number(completions):
    """NaN for the second row."""
    return [float("nan") if row == 1 else 0.0 for row in range(len(completions))]


def short(completions):
    """One value too few."""
    return [0.0] * (len(completions) - 1)


def words(completions):
    """Text where numbers belong."""
    return ["good" for _ in completions]


def broken(completions):
    """Fails."""
    raise KeyError("answer")


def one_number(completions):
    """A number instead of a list."""
    return 1.0


def needs_solution(completions, solution):
    """Needs a column that no test dataset has."""
    return [0.0 for _ in completions]


def two(completions):
    """A score beyond 1."""
    return [2.0 for _ in completions]


def untidy(completions, completion_ids, answer):
    """1 for a row as it came; it then changes all that it got."""
    values = [float(len(completion_ids[row]) == row + 1 and bool(answer[row])) for row in range(len(completions))]
    for part in (*answer, *completion_ids, completions, completion_ids, answer):
        part.clear()
    return values


def untidy_too(completions, completion_ids, answer):
    """The same under another name."""
    return untidy(completions, completion_ids, answer)
