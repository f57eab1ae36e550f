"""Reading a config.json: nothing is guessed, and what the model here cannot be is refused by name."""

from typing import Any

from ..config import RopeScaling

_NEEDED = object()


class ConversionError(ValueError):
    """A checkpoint that cannot be converted; the message lists every problem found and the remedy."""

    def __init__(self, what: str, problems: list[str] | None = None):
        super().__init__(what + "".join(f"\n  - {problem}" for problem in problems or []))
        self.problems = problems or [what]


class ConfigReader:
    """A config.json whose keys are asked for one by one; `finish` raises for all that was refused."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.problems: list[str] = []

    def need(self, key: str) -> Any:
        """Raises ConversionError where the key is missing: a default of some class is not what trained the model."""
        value = self.config.get(key, _NEEDED)
        if value is _NEEDED or value is None:
            raise ConversionError(f"config.json has no {key}. Add it: no default is assumed.")
        return value

    def get(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        return default if value is None else value

    def expect(self, key: str, *allowed: Any) -> None:
        """Refuse a value other than these; an absent key or null is the first."""
        value = self.get(key, allowed[0])
        if value not in allowed:
            self.problems.append(f"{key} is {value!r}; the model here can only be {' or '.join(map(repr, allowed))}.")

    def refuse(self, problem: str) -> None:
        self.problems.append(problem)

    def finish(self) -> None:
        if self.problems:
            raise ConversionError("config.json describes a model that cannot be imported:", self.problems)

    def rope(self) -> dict[str, Any]:
        """`rope_theta` and `rope_scaling` of our ModelConfig, from the nested dict (v5) or the older top-level keys.

        Raises ConversionError where no theta is given.
        """
        nested = self.get("rope_parameters", {})
        scaling = nested or self.get("rope_scaling", {})
        theta = nested.get("rope_theta", self.config.get("rope_theta"))
        if theta is None:
            raise ConversionError(
                "config.json has rope_theta neither in rope_parameters nor at the top. Add it: no default is assumed."
            )
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind == "default":
            return dict(rope_theta=float(theta), rope_scaling=RopeScaling())
        if kind != "llama3":
            self.refuse(f"rope_type is {kind!r}; the model here knows default and llama3.")
            return dict(rope_theta=float(theta), rope_scaling=RopeScaling())
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        if lacks := [name for name in names if name not in scaling]:
            raise ConversionError(f"config.json: the llama3 RoPE scaling lacks {', '.join(lacks)}.")
        factor, low, high, length = (scaling[name] for name in names)
        return dict(
            rope_theta=float(theta),
            rope_scaling=RopeScaling(
                factor=float(factor),
                low_freq_factor=float(low),
                high_freq_factor=float(high),
                original_length=int(length),
            ),
        )

    def partial_rotary_factor(self) -> float | None:
        return self.get("rope_parameters", {}).get("partial_rotary_factor", self.config.get("partial_rotary_factor"))


def rope_parameters(theta: float, scaling: RopeScaling) -> dict[str, Any]:
    """The nested dict of config.json."""
    if scaling.factor == 1:
        return {"rope_type": "default", "rope_theta": theta}
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_length,
    }
