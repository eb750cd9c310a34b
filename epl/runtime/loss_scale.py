"""The factor by which losses are multiplied before backward, so that small gradients do not become zero in float16.

A float16 number below 6e-8 is zero, and gradients often are. A loss that is multiplied makes all gradients larger; they
are divided before the optimizer steps. A factor that is too large makes some infinite: such a step is skipped, and the
factor halved. One that has not been too large for long is doubled.

    scale 32768 --overflow--> 16384 --2000 good steps in a row--> 32768

bfloat16 has the range of float32 and needs none of this. Ranks have to agree on whether a step overflows: `update` is told.

Source: Micikevicius et al. 2018, Mixed Precision Training, 3.2. The numbers are those of the dynamic loss scale of
TensorFlow, which EPL used for ``amp.loss_scale = "dynamic"`` (2**15, 2, 2000); torch.amp.GradScaler and NVIDIA Apex start
at 2**16.
"""

from __future__ import annotations

from typing import Any

from epl.errors import RunError
from epl.lines import warn

__all__ = ["LossScale"]

START = 2.0**15
FACTOR = 2.0
GOOD_STEPS = 2000  # in a row, before the scale is doubled
LOWEST = 1.0
MANY_STUCK = 10  # overflows in a row at a fixed scale that are worth a warning; at the lowest one, 2 are

DYNAMIC = "dynamic"


class LossScale:
    """A scale of losses: adapted, or fixed.

    Args:
        setting: ``dynamic``, or the scale itself, which then stays: an overflow only skips the step.

    Example:
        >>> scale = LossScale()
        >>> scale.update(overflow=True)
        >>> scale.scale, scale.num_skipped
        (16384.0, 1)
    """

    def __init__(self, setting: str | float = DYNAMIC) -> None:
        self.is_dynamic = isinstance(setting, str)
        assert setting == DYNAMIC or not isinstance(setting, str), setting
        self.scale = START if isinstance(setting, str) else float(setting)
        self.num_skipped = 0
        self._num_good = 0  # since the last overflow or change of the scale
        self._num_stuck = 0  # overflows in a row at a scale that gets no lower

    def update(self, overflow: bool) -> None:
        """Adapt the scale after a step; with an overflow the step has to be skipped.

        Args:
            overflow: Whether a gradient of any rank is infinite or not a number.
        """
        if overflow:
            self.num_skipped += 1
            self._num_good = 0
            self._warn_if_stuck()
            self._set(self.scale / FACTOR)
            return
        self._num_stuck = 0
        self._num_good += 1
        if self._num_good == GOOD_STEPS:
            self._num_good = 0
            self._set(self.scale * FACTOR)

    def _set(self, scale: float) -> None:
        if self.is_dynamic:
            self.scale = max(scale, LOWEST)

    def _warn_if_stuck(self) -> None:
        """Where a smaller scale does not help, forward or the weights are not finite, and no step will be made."""
        if self.is_dynamic and self.scale > LOWEST:
            return
        self._num_stuck += 1
        if self._num_stuck != (2 if self.is_dynamic else MANY_STUCK):
            return
        cure = "" if self.is_dynamic else "Use amp.loss_scale 'dynamic' or a smaller one. "
        warn(
            f"gradients were infinite or not a number in {self._num_stuck} steps one after another, at loss scale "
            f"{self.scale:g}, which gets no lower. These steps are skipped: the weights stay as they are. {cure}Look for "
            "infinite values in the batch, in forward and in the weights, or use amp.dtype 'bf16'."
        )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "num_skipped": self.num_skipped, "num_good_steps": self._num_good}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint was; a fixed scale stays the one that is configured.

        Raises:
            RunError: it is not the state of a loss scale.
        """
        missing = {"scale", "num_skipped", "num_good_steps"} - state.keys()
        if missing:
            raise RunError(f"the state of the loss scale has {sorted(state)}, and lacks {sorted(missing)}")
        self.num_skipped = int(state["num_skipped"])
        if self.is_dynamic:
            self.scale = max(float(state["scale"]), LOWEST)
            self._num_good = int(state["num_good_steps"])
