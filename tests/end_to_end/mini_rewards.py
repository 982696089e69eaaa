"""The reward of mini.yaml: user code beside a recipe. It differs between any two answers of an untrained model."""


def variety(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """How many different characters a completion has."""
    return [float(len(set(text))) for text in completions]
