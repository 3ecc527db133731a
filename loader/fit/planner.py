"""Fits a model to the memory of devices: how long its context can be, which layers go where.

The algorithm, its limits and its messages are those of llama.cpp's llama_params_fit
(January 2026). The memory that a placement needs is asked for, probe by probe:

1. With the parameters as they are: when that fits, nothing is changed.
2. Else the context is shortened, unless the caller has set it: by linear
   interpolation between the shortest one and that of the training.
3. Else layers are given to devices, from the back, each device as many as fit
   (the method of false position). Of a model with experts, all experts stay on
   the host at first.
4. When everything but the experts fits, layers get their experts back, from the
   front, and one more layer may be there in part; what of it doesn't fit goes to
   the next device or the host.

Pure arithmetic: no files, no devices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from operator import index
from typing import TypeAlias

from loader.device.memory import DeviceMemory
from loader.fit.result import HOST_NAME, FitParams, FitResult, Override

logger = logging.getLogger("loader")

MOST_DEVICES, MOST_OVERRIDES, MOST_LAYERS = 16, 4096, 1000
DEFAULT_MARGIN = 1024 << 20
DEFAULT_N_CTX_MIN = 4096

_CONTEXT_UNIT = 256
_EXPERTS = r"ffn_(up|down|gate)_(ch|)exps"
_MIB = 1 << 20

# (model, context, compute) bytes of each device, in order, for these parameters.
Figures: TypeAlias = Callable[[FitParams], Sequence[tuple[int, int, int]]]


class _Failure(Exception):  # noqa: N818 - a status, not an error
    """What was asked for can't be met."""


class _Part(Enum):
    """What of a layer is on its device when not all of it is: the pattern is of the rest."""

    ATTENTION = r"\.ffn_(up|gate|down).*"
    UP = r"\.ffn_(gate|down).*"
    GATE = r"\.ffn_down.*"
    DENSE = rf"\.{_EXPERTS}"


@dataclass(frozen=True)
class _Share:
    """What a device holds: layers, of which the first n_part are there in part. first_part: how
    much of the first of these; the others have all but their experts. overflow: where the rest of
    the first one goes."""

    n_layer: int = 0
    n_part: int = 0
    first_part: _Part = _Part.DENSE
    overflow: str = HOST_NAME

    @property
    def n_full(self) -> int:
        return self.n_layer - self.n_part


_Shares: TypeAlias = tuple[_Share, ...]


def plan(
    figures: Figures,
    *,
    devices: Sequence[DeviceMemory],
    host: DeviceMemory,
    n_layer: int,
    n_expert: int,
    n_ctx_train: int,
    margins: Sequence[int] | int = DEFAULT_MARGIN,
    params: FitParams | None = None,
    n_ctx_min: int = DEFAULT_N_CTX_MIN,
) -> FitResult:
    """Finds parameters with which every device keeps its margin free.

    figures: the memory that a placement needs; devices, host: what there is, in
    bytes (a device of 0 free and 0 total uses the host's); n_layer: without the
    output layer; n_expert: 0 for a dense model; margins: bytes that are to stay
    free, one for each device or one for all. Doesn't raise for a status; what
    `figures` raises passes through, but for a ValueError, which is an "error".
    """
    wanted = FitParams() if params is None else params
    planner = None
    try:
        planner = _Planner(
            figures, devices, host, n_layer, n_expert, n_ctx_train, margins, wanted, n_ctx_min
        )
        found = planner.run()
    except _Failure as failure:
        assert planner is not None  # noqa: S101 - it fails when it runs
        logger.warning("failed to fit params to free device memory: %s", failure)
        return _result("failure", str(failure), planner.params, planner.shortfall())
    except ValueError as error:
        logger.error(
            "encountered an error while trying to fit params to free device memory: %s", error
        )
        return _result("error", str(error), wanted if planner is None else planner.params)
    logger.info("successfully fit params to free device memory")
    return _result("success", "", found)


def _result(status: str, reason: str, params: FitParams, shortfall: int = 0) -> FitResult:
    return FitResult(
        shortfall=shortfall,
        status=status,  # type: ignore[arg-type]  # one of the three
        reason=reason,
        n_ctx=params.n_ctx,
        n_gpu_layers=params.n_gpu_layers,
        tensor_split=params.tensor_split or (),
        overrides=params.overrides,
    )


def _quotient(a: int, b: int) -> int:
    """a / b rounded towards zero, as C does it."""
    return abs(a) // abs(b) * (1 if (a >= 0) == (b >= 0) else -1)


class _Planner:
    """One fit. params: as far as they have been changed."""

    def __init__(
        self,
        figures: Figures,
        devices: Sequence[DeviceMemory],
        host: DeviceMemory,
        n_layer: int,
        n_expert: int,
        n_ctx_train: int,
        margins: Sequence[int] | int,
        params: FitParams,
        n_ctx_min: int,
    ) -> None:
        self.params = params
        self._figures = figures
        self._names = [device.name for device in devices]
        self._memory = [host if device.free == device.total == 0 else device for device in devices]
        self._margins = _checked_margins(margins, len(devices))
        self._n_layer = n_layer
        self._n_expert = n_expert
        self._n_ctx_train = n_ctx_train
        self._n_ctx_min = n_ctx_min
        if len(devices) > MOST_DEVICES:
            raise ValueError(f"at most {MOST_DEVICES} devices are supported, not {len(devices)}")
        _check_split(params.tensor_split, len(devices))
        for device in devices:
            if device.free == device.total == 0:
                logger.warning("%s reports no memory; the host's is taken for it", device.name)
        self._several = len(devices) > 1
        self._last = len(devices) - 1
        self._targets = [
            memory.free - margin for memory, margin in zip(self._memory, self._margins, strict=True)
        ]

    # --- Steps 1 and 2 ---

    def run(self) -> FitParams:
        if not self._names:
            logger.info("no devices with dedicated memory found")
            return self.params
        used = self._used_with_models(self.params)
        totals = [total for total, _ in used]
        if self._several:
            logger.info("projected memory use with initial parameters [MiB]:")
            each = zip(self._names, self._memory, totals, self._margins, strict=True)
            for name, memory, total, margin in each:
                logger.info(
                    "  - %s: %6d total, %6d used, %6d free vs. target of %6d",
                    name, memory.total // _MIB, total // _MIB,
                    _quotient(memory.free - total, _MIB), margin // _MIB,
                )  # fmt: skip
        logger.info(
            "projected to use %d MiB of device memory vs. %d MiB of free device memory",
            sum(totals) // _MIB,
            sum(memory.free for memory in self._memory) // _MIB,
        )
        if all(total <= target for total, target in zip(totals, self._targets, strict=True)):
            if self._several:
                logger.info("targets for free memory can be met on all devices, no changes needed")
            else:
                logger.info(
                    "will leave %d >= %d MiB of free device memory, no changes needed",
                    _quotient(self._memory[0].free - totals[0], _MIB), self._margins[0] // _MIB,
                )  # fmt: skip
            return self.params
        if sum(totals) > sum(self._targets) and self._shorten_context(used):
            return self.params
        self._refuse_what_the_caller_has_set()
        return self._place_layers()

    def shortfall(self) -> int:
        """Bytes that the devices are over their targets with the parameters as they are."""
        used = self._used_with_models(self.params)
        return sum(
            max(total - target, 0) for (total, _), target in zip(used, self._targets, strict=True)
        )

    def _used_with_models(self, params: FitParams) -> list[tuple[int, int]]:
        """Bytes per device: all of them, and those of the model."""
        found = list(self._figures(params))
        if len(found) != len(self._names):
            raise ValueError(f"figures for {len(found)} of {len(self._names)} devices")
        return [(model + context + compute, model) for model, context, compute in found]

    def _shorten_context(self, used: Sequence[tuple[int, int]]) -> bool:
        """Step 2. Whether that is all that is needed."""
        total, deficit = sum(t for t, _ in used), sum(t for t, _ in used) - sum(self._targets)
        if self._several:
            logger.info(
                "cannot meet free memory targets on all devices, need to use %d MiB less in total",
                deficit // _MIB,
            )
        else:
            logger.info(
                "cannot meet free memory target of %d MiB, need to reduce device memory by %d MiB",
                self._margins[0] // _MIB, deficit // _MIB,
            )  # fmt: skip
        low, high = self._n_ctx_min, self._n_ctx_train
        if self.params.n_ctx != 0:
            logger.info("context size set by user to %d -> no change", self.params.n_ctx)
            return False
        if high <= low:
            logger.info(
                "default model context size is %d which is <= the min. context size of %d -> no "
                "change", high, low,
            )  # fmt: skip
            return False
        target = sum(self._targets)
        if self._several:
            # Only whole layers, or tensors of at most a third of one, can be placed: some of each
            # device's memory stays empty.
            layers = self._n_layer
            if self.params.n_gpu_layers >= 0:
                layers = min(self.params.n_gpu_layers, layers)
            per_layer = sum(model for _, model in used) // max(layers, 1)
            waste = (len(used) + 1) * per_layer
            target -= waste // (2 if self._n_expert == 0 else 6)
        self.params = replace(self.params, n_ctx=low)
        least = sum(t for t, _ in self._used_with_models(self.params))
        fits = target > least
        if fits:
            context = low + (high - low) * (target - least) // max(total - least, 1)
            context = max(context - context % _CONTEXT_UNIT, low)
            self.params = replace(self.params, n_ctx=context)
        logger.info(
            "context size reduced from %d to %d -> need %d MiB less memory in total",
            high, self.params.n_ctx,
            (high - self.params.n_ctx) * ((total - least) // (high - low)) // _MIB,
        )  # fmt: skip
        if fits and not self._several:
            logger.info("entire model can be fit by reducing context")
        elif fits:
            logger.info("entire model should be fit across devices by reducing context")
        return fits and not self._several

    def _refuse_what_the_caller_has_set(self) -> None:
        params = self.params
        if params.n_gpu_layers != -1:
            raise _Failure(f"n_gpu_layers already set by user to {params.n_gpu_layers}, abort")
        if self._several:
            if any(params.tensor_split or ()):
                raise _Failure("model_params::tensor_split already set by user, abort")
            if params.split_mode == "row":
                raise _Failure(
                    "changing weight allocation for LLAMA_SPLIT_MODE_ROW not implemented, abort"
                )
        if params.overrides:
            raise _Failure("model_params::tensor_buft_overrides already set by user, abort")

    # --- Steps 3 and 4 ---

    def _params_of(self, shares: _Shares) -> FitParams:
        """llama.cpp's parameters for what devices hold."""
        placed = sum(share.n_layer for share in shares)
        overrides: list[Override] = []
        layer = self._n_layer + 1 - placed
        for share in shares:
            layer += share.n_full
            for number in range(share.n_part):
                if len(overrides) + 1 >= MOST_OVERRIDES:
                    raise _Failure(
                        f"llama_max_tensor_buft_overrides() == {MOST_OVERRIDES} is insufficient "
                        "for model"
                    )
                if layer >= MOST_LAYERS:
                    raise ValueError(f"at most {MOST_LAYERS} model layers are supported")
                part = share.first_part if number == 0 else _Part.DENSE
                where = share.overflow if number == 0 else HOST_NAME
                overrides.append((rf"blk\.{layer}{part.value}", where))
                layer += 1
        split = tuple(float(share.n_layer) for share in shares) if self._several else None
        return replace(
            self.params, n_gpu_layers=placed, tensor_split=split, overrides=tuple(overrides)
        )

    def _used(self, shares: _Shares) -> list[int]:
        used = [total for total, _ in self._used_with_models(self._params_of(shares))]
        for name, share, total in zip(self._names, shares, used, strict=True):
            logger.debug(
                "%s: n_layer=%d, n_part=%d, first_part=%s, mem=%d MiB",
                name, share.n_layer, share.n_part, share.first_part.name, total // _MIB,
            )  # fmt: skip
        return used

    def _place_layers(self) -> FitParams:
        surplus = self._surplus_without_experts() if self._n_expert else 0
        shares: _Shares = (_Share(),) * len(self._names)
        used = self._used(shares)
        logger.info("filling %s layers back-to-front:", "dense-only" if self._n_expert else "dense")
        for device in reversed(range(len(shares))):
            shares, used = self._fill(device, shares, used)
            logger.info(
                "  - %s: %2d layers, %6d MiB used, %6d MiB free",
                self._names[device], shares[device].n_layer, used[device] // _MIB,
                _quotient(self._memory[device].free - used[device], _MIB),
            )  # fmt: skip
        steps = [shares]
        if self._n_expert and surplus > 0:
            steps += self._give_experts_back(shares, used)
        return self._last_within_targets(steps)

    def _last_within_targets(self, steps: Sequence[_Shares]) -> FitParams:
        """llama.cpp takes for granted what it hasn't looked at: other devices' shares while it
        searches for one, and the rounding of the proportions. Where that goes wrong, its last steps
        are taken back."""
        reason = ""
        for shares in reversed(steps):
            params = self._params_of(shares)
            over = self._over_targets(params)
            if not over:
                return params
            reason = reason or (
                f"no placement was found that meets every target; over it: {', '.join(over)}"
            )
        raise _Failure(reason)

    def _over_targets(self, params: FitParams) -> list[str]:
        """The devices that hold something and are over their targets, and by how much."""
        used = [total for total, _ in self._used_with_models(params)]
        return [
            f"{name} by {-(-(total - target) // _MIB)} MiB"
            for name, total, target in zip(self._names, used, self._targets, strict=True)
            if total > target and total > 0
        ]

    def _surplus_without_experts(self) -> int:
        everything = replace(self.params, overrides=((rf"blk\.\d+\.{_EXPERTS}", HOST_NAME),))
        used = [total for total, _ in self._used_with_models(everything)]
        surplus = sum(self._targets) - sum(used)
        logger.info(
            "with only dense weights in device memory there is %s of %d MiB",
            "a total surplus" if surplus > 0 else "still a total deficit", abs(surplus) // _MIB,
        )  # fmt: skip
        return surplus

    def _fill(self, device: int, shares: _Shares, used: list[int]) -> tuple[_Shares, list[int]]:
        """Step 3 for one device: as many of the layers that no device has as fit."""
        unassigned = self._n_layer + 1 - sum(share.n_layer for share in shares[device + 1 :])
        if unassigned <= 0:
            return shares, used
        # The last layer is the output layer, which is always whole.
        is_last = device == self._last

        def advance(state: _State, layers: int) -> _State:
            parts = layers if self._n_expert else 0
            if parts and is_last and state.shares[device].n_part == 0:
                parts -= 1
            return _State(_with(state.shares, device, layers=layers, parts=parts), state.first)

        parts = unassigned - is_last if self._n_expert else 0
        most = _State(_replaced(shares, device, _Share(unassigned, parts)), 0)
        found, used = self._search(
            device, _State(shares, 0), used, most, advance, lambda share: share.n_layer
        )
        return found.shares, used

    def _search(
        self,
        device: int,
        low: _State,
        used: list[int],
        high: _State,
        advance: Callable[[_State, int], _State],
        count: Callable[[_Share], int],
    ) -> tuple[_State, list[int]]:
        """The method of false position: from `low`, which is within the device's target, to `high`,
        the state with the most layers (as `count` counts them) that is, too.

        used: bytes per device for `low`; advance: the state with so many layers more.
        """
        target = self._targets[device]
        used_high = self._used(high.shares)
        if used_high[device] <= target:
            return high, used_high
        while (delta := count(high.shares[device]) - count(low.shares[device])) > 1:
            slope = used_high[device] - used[device]
            step = _quotient(delta * (target - used[device]), slope) if slope else 1
            # Over the target already: as C's unsigned numbers have it, the largest step.
            step = min(max(step, 1), delta - 1) if step >= 0 else delta - 1
            test = advance(low, step)
            used_test = self._used(test.shares)
            if used_test[device] <= target:
                low, used = test, used_test
            else:
                high, used_high = test, used_test
            if count(high.shares[device]) - count(low.shares[device]) >= delta:
                break  # no progress: layers that can't be moved
        return low, used

    def _give_experts_back(self, shares: _Shares, used: list[int]) -> list[_Shares]:
        """Step 4: whole layers from the front. What devices hold after each step."""
        logger.info(
            "converting dense-only layers to full layers and filling them front-to-back with "
            "overflow to next device/system memory:"
        )
        # The first device of those at the end that have layers.
        first = len(shares)
        while first > 0 and shares[first - 1].n_layer > 0:
            first -= 1
        state, device = _State(shares, first), 0
        steps = []
        while device <= state.first <= self._last:
            state, used = self._convert(device, state, used)
            steps.append(state.shares)
            state, used = self._add_part(device, state, used)
            steps.append(state.shares)
            share = state.shares[device]
            logger.info(
                "  - %s: %2d layers (%2d overflowing), %6d MiB used, %6d MiB free",
                self._names[device], share.n_layer, share.n_part, used[device] // _MIB,
                _quotient(self._memory[device].free - used[device], _MIB),
            )  # fmt: skip
            device += 1
        return steps

    def _convert(self, device: int, state: _State, used: list[int]) -> tuple[_State, list[int]]:
        """As many dense-only layers as fit become whole ones on the device."""

        def advance(state: _State, layers: int) -> _State:
            shares, first = state.shares, state.first
            while first <= self._last:
                moved = min(layers, shares[first].n_part)
                shares = _with(shares, first, layers=-moved, parts=-moved)
                shares = _with(shares, device, layers=moved)
                layers -= moved
                if shares[first].n_part > 0:
                    break
                first += 1
            return _State(shares, first)

        most = state.shares
        for other in range(state.first, len(most)):
            share = most[other]
            moved = share.n_layer if other < self._last else max(share.n_layer - 1, 0)
            most = _with(most, device, layers=moved)
            most = _with(most, other, layers=-moved, parts=-most[other].n_part)
        return self._search(
            device, state, used, _State(most, self._last), advance, lambda share: share.n_full
        )

    def _add_part(self, device: int, state: _State, used: list[int]) -> tuple[_State, list[int]]:
        """One more layer, of which as much is on the device as fits; the rest goes to the next
        device, or the host."""
        if not 0 <= state.first <= self._last:
            return state, used
        giver = state.shares[state.first]
        if giver.n_layer <= (0 if device < self._last else 1) or giver.n_part == 0:
            return state, used
        shares = _with(state.shares, state.first, layers=-1, parts=-1)
        shares = _with(shares, device, layers=1, parts=1)
        first = state.first + (shares[state.first].n_part == 0)  # the giver may be the taker
        overflow = self._names[device + 1] if device < self._last else HOST_NAME

        def attempt(part: _Part) -> tuple[_State, list[int]] | None:
            share = replace(shares[device], first_part=part, overflow=overflow)
            test = _State(_replaced(shares, device, share), first)
            found = self._used(test.shares)
            here = range(device, min(device + 2, len(found)))
            return (test, found) if all(found[i] < self._targets[i] for i in here) else None

        up = attempt(_Part.UP)
        found = attempt(_Part.ATTENTION) if up is None else attempt(_Part.GATE) or up
        return (state, used) if found is None else found


@dataclass(frozen=True)
class _State:
    """What devices hold, and the first of them that has layers without their experts."""

    shares: _Shares
    first: int


def _replaced(shares: _Shares, device: int, share: _Share) -> _Shares:
    return (*shares[:device], share, *shares[device + 1 :])


def _with(shares: _Shares, device: int, *, layers: int = 0, parts: int = 0) -> _Shares:
    """With so many layers more on a device, so many of them in part."""
    share = shares[device]
    share = replace(share, n_layer=share.n_layer + layers, n_part=share.n_part + parts)
    return _replaced(shares, device, share)


def _check_split(split: Sequence[float] | None, count: int) -> None:
    if split and count and len(split) != count:
        raise ValueError(f"{len(split)} proportions for {count} devices: {list(split)}")
    if any(not 0 <= part < float("inf") for part in split or ()):
        raise ValueError(f"proportions must be numbers from 0 on: {list(split or ())}")


def _checked_margins(margins: Sequence[int] | int, count: int) -> list[int]:
    given = list(margins) if isinstance(margins, Iterable) else [index(margins)]
    if len(given) == 1:
        given *= max(count, 1)
    if len(given) != count and (count or len(given) > 1):
        raise ValueError(f"{len(given)} margins for {count} devices: one for each, or one for all")
    if any(margin < 0 for margin in given):
        raise ValueError(f"margins can't be negative: {min(given)}")
    return given[:count]
