"""A planner that keeps simulated estimates on disk and simulates missing ones on all cores."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

from shardmake.core.atomic import write_json
from shardmake.memory.buckets import Buckets
from shardmake.memory.cache import cached_path
from shardmake.memory.estimate import Estimate, from_json
from shardmake.memory.scenario import Scenario
from shardmake.plan.candidates import Candidate
from shardmake.plan.planner import Planner, buckets_of, scenario_of
from shardmake.run.plan import Choice


class CachedPlanner(Planner):
    """A `Planner` whose simulations outlive the process."""

    def simulate_all(self, possible: Sequence[Choice]) -> list[Candidate]:
        """Return ``possible`` simulated. Neighbours share the events of a step, so each core takes a run of them."""
        self.prepare(possible)
        missing = [choice for choice in possible if not self._path_of(choice).is_file()]
        cores = min(len(os.sched_getaffinity(0)), len(missing))
        if cores > 1:
            share = -(-len(missing) // cores)
            parts = [missing[start : start + share] for start in range(0, len(missing), share)]
            with get_context("fork").Pool(len(parts)) as pool:  # this process has no threads and no torch
                pool.map(self._simulate_part, parts)
        return [self.simulate(choice) for choice in possible]

    def _simulate_part(self, part: Sequence[Choice]) -> None:
        for choice in part:
            self.simulate(choice)

    def _simulated(self, scenario: Scenario, buckets: Buckets) -> Estimate:
        path = self._path(scenario, buckets)
        if path.is_file():
            return from_json(json.loads(path.read_text()))
        memory = super()._simulated(scenario, buckets)
        write_json(path, memory.as_json())
        return memory

    def _path_of(self, choice: Choice) -> Path:
        return self._path(scenario_of(self.settings, choice), buckets_of(self.settings, choice))

    def _path(self, scenario: Scenario, buckets: Buckets) -> Path:
        """Return the file of an estimate, named by everything that the estimate depends on."""
        values = {name: value for name, value in vars(scenario).items() if name not in ("model", "split")}
        values["behavior"] = asdict(scenario.behavior)
        values["calibration"] = scenario.calibration and asdict(scenario.calibration)
        request = {
            "model": scenario.model.key,
            "settings": values,
            "buckets": vars(buckets),
            "kept": self._kept,
            "capacity": self.settings.hardware.gpu_memory,
        }
        return cached_path("shardmake.plan.estimate", request)
