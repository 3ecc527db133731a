"""The fit planner: made-up machines with the answers of llama.cpp's algorithm, and properties.

tests/data/fit_vectors.json holds 190 of them, which cover every branch; sizes are bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from loader.device.memory import DeviceMemory
from loader.fit import FitParams, FitResult, plan
from loader.fit.planner import DEFAULT_MARGIN

VECTORS = json.loads((Path(__file__).parent / "data" / "fit_vectors.json").read_text())
STATUS = ("success", "failure", "error")
SPLIT_MODES = ("none", "layer", "row")
Scenario = dict[str, Any]
Used = list[tuple[int, int, int]]
MIB, GIB = 1 << 20, 1 << 30


def tensors_of(scenario: Scenario, layer: int) -> list[tuple[str, int]]:
    """Names and sizes; the layer after the last one is the output layer."""
    if layer == scenario["n_layer"]:
        return [("output.weight", scenario["output"])]
    sizes = scenario["layer_kinds"][scenario["layers"][layer]]
    experts = "_exps" if scenario["n_expert"] else ""
    names = ["attn_q", *(f"ffn_{kind}{experts}" for kind in ("gate", "up", "down"))]
    return [(f"blk.{layer}.{name}.weight", size) for name, size in zip(names, sizes, strict=True)]


def figures_of(scenario: Scenario) -> Callable[[FitParams], Used]:
    """The memory that a placement needs on a made-up machine."""
    devices, host, n_layer = scenario["devices"], scenario["host"], scenario["n_layer"]
    names = [f"GPU{i}" for i in range(len(devices))]
    free = [host[0] if device == [0, 0] else device[0] for device in devices]
    layers = [tensors_of(scenario, layer) for layer in range(n_layer + 1)]

    def device_of(params: FitParams, layer: int) -> int | None:
        wanted = params.n_gpu_layers if params.n_gpu_layers >= 0 else n_layer + 1
        start, active = max(n_layer + 1 - wanted, 0), min(wanted, n_layer + 1)
        if layer < start or layer - start >= active:
            return None
        given = params.tensor_split or ()
        sums = np.cumsum(np.array(given if any(given) else free, np.float32), dtype=np.float32)
        place = np.float32(np.float32(layer - start) / np.float32(active))
        return int(np.argmax(sums / sums[-1] > place))

    def figures(params: FitParams) -> Used:
        n_ctx = params.n_ctx or scenario["n_ctx_train"]
        rules = [(re.compile(pattern), device) for pattern, device in params.overrides]
        model, kept = [0] * len(names), [0] * len(names)
        active = [False] * len(names)
        for layer, tensors in enumerate(layers):
            home = device_of(params, layer)
            if home is not None:
                active[home] = True
                kept[home] += layer < n_layer
            for name, size in tensors:
                device = next((where for rule, where in rules if rule.search(name)), None)
                there = home if device is None else None
                if device not in (None, "CPU"):
                    there = names.index(str(device))
                if there is not None:
                    model[there] += size
                    active[there] = True
        per_layer = scenario["kv_bytes_per_token_per_layer"] * n_ctx
        compute = scenario["compute_base"] + scenario["compute_per_token"] * n_ctx
        return [
            (model[i], per_layer * kept[i], compute if active[i] else 0) for i in range(len(names))
        ]

    return figures


def fit(scenario: Scenario, figures: Callable[[FitParams], Used] | None = None) -> FitResult:
    count = len(scenario["devices"])
    first = float(scenario["user_tensor_split_0"])
    return plan(
        figures or figures_of(scenario),
        devices=[DeviceMemory(f"GPU{i}", *d) for i, d in enumerate(scenario["devices"])],
        host=DeviceMemory("CPU", *scenario["host"]),
        n_layer=scenario["n_layer"],
        n_expert=scenario["n_expert"],
        n_ctx_train=scenario["n_ctx_train"],
        margins=scenario["margins"],
        n_ctx_min=scenario["n_ctx_min"],
        params=FitParams(
            n_ctx=scenario["n_ctx"],
            n_gpu_layers=scenario["user_n_gpu_layers"],
            tensor_split=(first, *[0.0] * (count - 1)) if first else None,
            split_mode=SPLIT_MODES[scenario["split_mode"]],  # type: ignore[arg-type]  # one of them
        ),
    )


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v['id']}-{v['branch'][:40]}")
def test_the_answers_of_llama_cpp(vector: dict[str, Any]) -> None:
    expected = vector["expected"]
    found = fit(vector["scenario"])
    assert found.status == STATUS[expected["status"]]
    assert found.n_ctx == expected["n_ctx"]
    assert found.n_gpu_layers == expected["n_gpu_layers"]
    assert list(found.tensor_split) == expected["tensor_split"]
    assert [list(override) for override in found.overrides] == expected["overrides"]
    if expected["status"] != 0:
        assert found.reason in vector["reason"]
        assert found.reason


MACHINE = st.fixed_dictionaries(
    {
        "devices": st.lists(
            st.integers(1 * MIB, 40 * GIB).map(lambda free: [free, free]), min_size=1, max_size=6
        ),
        "host": st.just([64 * GIB, 64 * GIB]),
        "n_layer": st.integers(1, 70),
        "n_expert": st.sampled_from([0, 8, 128]),
        "n_ctx_train": st.sampled_from([512, 4096, 32768, 131072]),
        "layer_kinds": st.lists(
            st.lists(st.integers(0, 400 * MIB), min_size=4, max_size=4), min_size=1, max_size=3
        ),
        "seed": st.integers(0, 1000),
        "output": st.integers(0, 2 * GIB),
        "kv_bytes_per_token_per_layer": st.sampled_from([0, 512, 4096, 16384]),
        "compute_base": st.integers(0, 600 * MIB),
        "compute_per_token": st.sampled_from([0, 256, 2048]),
        "n_ctx": st.sampled_from([0, 0, 4096, 16384]),
        "n_ctx_min": st.sampled_from([512, 4096]),
        "margin": st.sampled_from([0, 100 * MIB, 1 * GIB]),
        "user_n_gpu_layers": st.just(-1),
        "user_tensor_split_0": st.just(0),
        "split_mode": st.just(1),
    }
)


def complete(machine: Scenario) -> Scenario:
    random = np.random.default_rng(machine["seed"])
    layers = random.integers(0, len(machine["layer_kinds"]), machine["n_layer"]).tolist()
    return {**machine, "layers": layers, "margins": [machine["margin"]] * len(machine["devices"])}


def over_target(scenario: Scenario, found: FitResult) -> list[int]:
    """Devices that hold something and are over their targets."""
    params = FitParams(
        n_ctx=found.n_ctx,
        n_gpu_layers=found.n_gpu_layers,
        tensor_split=found.tensor_split or None,
        overrides=found.overrides,
    )
    used = [sum(figures) for figures in figures_of(scenario)(params)]
    pairs = zip(used, scenario["devices"], scenario["margins"], strict=True)
    return [
        i for i, (total, (free, _), margin) in enumerate(pairs) if total > max(free - margin, 0)
    ]


@settings(max_examples=400, deadline=None)
@given(MACHINE)
def test_no_device_is_over_its_target_and_the_end_is_near(machine: Scenario) -> None:
    scenario = complete(machine)
    probes = 0
    inner = figures_of(scenario)

    def figures(params: FitParams) -> Used:
        nonlocal probes
        probes += 1
        return inner(params)

    found = fit(scenario, figures)
    devices = len(scenario["devices"])
    assert probes <= 5 + devices * (2 * scenario["n_layer"] + 8)
    if found.status == "success":
        assert over_target(scenario, found) == []
        assert 0 <= found.n_gpu_layers <= scenario["n_layer"] + 1 or found.n_gpu_layers == -1
        assert found.n_ctx == scenario["n_ctx"] or (
            scenario["n_ctx"] == 0 and found.n_ctx >= min(scenario["n_ctx_min"], found.n_ctx)
        )
    else:
        assert "over it: GPU" in found.reason or "aborted" in found.reason


@settings(max_examples=300, deadline=None)
@given(MACHINE, st.integers(0, GIB))
def test_row_119_a_smaller_margin_is_never_worse(machine: Scenario, less: int) -> None:
    """It never shortens the context, and on one device never places fewer layers."""
    large = complete(machine)
    assume(large["margin"] > 0)
    margin = max(large["margin"] - less, 0)
    small = {**large, "margins": [margin] * len(large["devices"])}
    before, after = fit(large), fit(small)
    assume(before.status == after.status == "success")

    def context(found: FitResult) -> int:
        return int(found.n_ctx or large["n_ctx_train"])

    def layers(found: FitResult) -> int:
        return found.n_gpu_layers if found.n_gpu_layers >= 0 else int(large["n_layer"]) + 1

    assert context(after) >= context(before)
    if large["n_ctx"]:
        assert after.n_ctx == before.n_ctx == large["n_ctx"], "what the user set stays"
    if len(large["devices"]) == 1:
        assert layers(after) >= layers(before)


def small(**changes: Any) -> Scenario:
    """A model of 4 layers of 40 MiB and an output layer of 40 MiB, a device of 1 GiB."""
    scenario = {
        "devices": [[GIB, GIB]], "host": [8 * GIB, 8 * GIB], "n_layer": 4, "n_expert": 0,
        "n_ctx_train": 8192, "layer_kinds": [[10 * MIB] * 4], "layers": [0] * 4,
        "output": 40 * MIB, "kv_bytes_per_token_per_layer": 0, "compute_base": 10 * MIB,
        "compute_per_token": 0, "n_ctx": 0, "n_ctx_min": 4096, "margins": [0],
        "user_n_gpu_layers": -1, "user_tensor_split_0": 0, "split_mode": 1,
    }  # fmt: skip
    return {**scenario, **changes}


def test_margins_and_limits_that_make_no_sense() -> None:
    two = [[GIB, GIB]] * 2
    for changes, what in (
        ({"margins": [0, 0]}, "2 margins for 1 devices"),
        ({"devices": [*two, *two], "margins": [0, 0]}, "2 margins for 4 devices"),
        ({"margins": []}, "0 margins"),
        ({"margins": [-1]}, "negative"),
        ({"devices": [], "margins": [0, 0]}, "2 margins for 0 devices"),
        ({"devices": [[GIB, GIB]] * 17}, "at most 16 devices"),
    ):
        found = fit(small(**changes))
        assert (found.status, what in found.reason) == ("error", True), found.reason
        assert found.n_gpu_layers == -1
    assert fit(small(devices=two)).status == "success", "one margin for all"
    deep = small(n_layer=1200, layers=[0] * 1200, n_expert=8, devices=[[20 * GIB, 20 * GIB]])
    found = fit(deep)
    assert (found.status, found.reason) == ("error", "at most 1000 model layers are supported")


def test_steps_that_go_over_another_target_are_taken_back() -> None:
    """The original goes over the target of the last device here: what overflows to it isn't looked
    at again."""
    sizes = [429940235, 1983644117, 845375726]
    scenario = small(
        devices=[[size, size] for size in sizes], margins=[0, 0, 0], n_layer=17, n_expert=8,
        n_ctx_train=2048, output=146800640, compute_base=5242880, compute_per_token=1024,
        kv_bytes_per_token_per_layer=256,
        layers=[0, 1, 0, 0, 1, 0, 1, 1, 0, 0, 1, 1, 0, 1, 0, 0, 0],
        layer_kinds=[
            [15728640, 54525952, 85983232, 92274688], [48234496, 179306496, 127926272, 133169152],
        ],
    )  # fmt: skip
    found = fit(scenario)
    assert (found.status, over_target(scenario, found)) == ("success", [])
    assert sum(found.tensor_split) == 18, "all layers, and some of their experts"
    without = [rule for rule in found.overrides if "exps" in rule[0]]
    assert 0 < len(without) < 17


def test_a_device_that_gives_and_takes_its_last_layer_in_part() -> None:
    """It stays the first one with such layers, as in the original."""
    sizes = [96751834, 226856435, 502726846, 595373033]
    found = fit(
        small(
            devices=[[size, size] for size in sizes], n_layer=7, layers=[0] * 7, n_expert=8,
            layer_kinds=[[132120576, 22020096, 52428800, 23068672]], output=0, compute_base=0,
            n_ctx=4096,
        )
    )  # fmt: skip
    assert found.tensor_split == (0.0, 1.0, 3.0, 4.0)
    assert (r"blk\.1\.ffn_(up|down|gate)_(ch|)exps", "CPU") in found.overrides


def test_row_109_a_device_without_figures_uses_the_hosts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("WARNING", "loader"):
        found = fit(small(devices=[[0, 0]], host=[100 * MIB, 200 * MIB]))
    assert "GPU0 reports no memory" in caplog.text
    assert (found.status, found.n_gpu_layers) == ("success", 2)


def test_row_115_each_device_is_filled_to_its_own_room() -> None:
    found = fit(
        small(
            devices=[[12 * GIB, 12 * GIB], [8 * GIB, 8 * GIB]], margins=[0, 0],
            n_layer=20, layers=[0] * 20, layer_kinds=[[256 * MIB] * 4], output=0, compute_base=0,
        )
    )  # fmt: skip
    assert found.status == "success"
    assert found.tensor_split == (12.0, 9.0), "the output layer of nothing counts as one"


def test_row_118_what_the_caller_has_set_stays() -> None:
    params = FitParams(n_ctx=0, n_gpu_layers=3)
    found = plan(
        figures_of(small()),
        devices=[DeviceMemory("GPU0", 20 * MIB, GIB)],
        host=DeviceMemory("CPU", GIB, GIB),
        n_layer=4,
        n_expert=0,
        n_ctx_train=8192,
        params=params,
    )
    assert found.status == "failure"
    assert found.reason == "n_gpu_layers already set by user to 3, abort"
    assert params == FitParams(n_ctx=0, n_gpu_layers=3)
    assert found.n_gpu_layers == 3
    # And how much is missing: what its layers, at the shortest context, need above the target.
    (need,) = figures_of(small())(replace(params, n_ctx=found.n_ctx))
    assert found.shortfall == sum(need) - (20 * MIB - DEFAULT_MARGIN) > GIB


def test_what_the_log_says_in_mib(caplog: pytest.LogCaptureFixture) -> None:
    """As the original does, of one device and of several."""
    caplog.set_level("INFO", "loader")
    one = small(devices=[[GIB, GIB]], margins=[16 * MIB])
    assert fit(one).status == "success"
    assert re.search(r"will leave \d+ >= 16 MiB of free device memory, no changes", caplog.text)
    caplog.clear()
    fit(small(devices=[[GIB, GIB]] * 2, margins=[16 * MIB]))
    assert "projected memory use with initial parameters [MiB]:" in caplog.text
    assert "targets for free memory can be met on all devices, no changes needed" in caplog.text
    caplog.clear()
    fit(small(devices=[[20 * MIB, GIB]], margins=np.int64(16 * MIB)))
    assert re.search(
        r"cannot meet free memory target of 16 MiB, need to reduce device memory by \d+ MiB",
        caplog.text,
    )
    caplog.clear()
    fit(small(devices=[[GIB, GIB]], margins=[0, 0]))
    assert caplog.records[0].levelname == "ERROR"
    assert caplog.records[0].getMessage() == (
        "encountered an error while trying to fit params to free device memory: 2 margins for 1 "
        "devices: one for each, or one for all"
    )


def test_figures_of_the_wrong_length_are_an_error() -> None:
    found = fit(small(), lambda _: [])
    assert (found.status, found.reason) == ("error", "figures for 0 of 1 devices")
