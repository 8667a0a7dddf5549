"""The best of 64 trials, 8 in parallel, over 24 seeds: a sweep's TPE compared with Optuna alone and Ray Tune's
OptunaSearch.

Each side proposes for the same function, and its trials take the same times. No training runs: only proposals count.
For Ray Tune, name a Python that has ``ray[tune]`` and ``optuna``: ``--ray-python PATH``. Otherwise it is left out.
"""

from __future__ import annotations

import heapq
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from common import Figure, options, parser, report

from cloudtrain.runs.sweeps.samplers import propose
from cloudtrain.runs.sweeps.spec import SweepSpec
from cloudtrain.runs.sweeps.state import Outcome, State, Trial

TRIALS, PARALLEL, TARGET = 64, 8, 1.05
SPACE: dict[str, Any] = {
    "lr": {"low": 1e-5, "high": 1e-1, "log": True},
    "dropout": {"low": 0.0, "high": 0.6},
    "layers": {"low": 1, "high": 12},
    "optimizer": ["adamw", "lion", "sgd"],
}
Params = dict[str, Any]
WITH_RAY = """
import json, sys
from ray.tune.search.optuna import OptunaSearch
from optuna import distributions as d
space = {"lr": d.FloatDistribution(1e-5, 1e-1, log=True), "dropout": d.FloatDistribution(0.0, 0.6),
         "layers": d.IntDistribution(1, 12), "optimizer": d.CategoricalDistribution(["adamw", "lion", "sgd"])}
search = OptunaSearch(space, metric="loss", mode="min", seed=int(sys.argv[1]))
for line in sys.stdin:
    word = json.loads(line)
    if word["value"] is None:
        print(json.dumps(search.suggest(str(word["n"]))), flush=True)
    else:
        search.on_trial_complete(str(word["n"]), {"loss": word["value"]})
"""


def loss(params: Params) -> float:
    """Return a toy loss with interactions, at least 0.1."""
    rate = math.log10(params["lr"]) + {"adamw": 3.0, "lion": 4.0, "sgd": 1.5}[params["optimizer"]]
    depth = (params["layers"] - 8) / 4
    extra = {"adamw": 0.0, "lion": 0.02, "sgd": 0.15}[params["optimizer"]]
    return 0.1 + extra + 0.3 * rate**2 + 0.2 * depth**2 + (params["dropout"] - 0.05 * params["layers"] / 2) ** 2


def best(seed: int, ask: Callable[[int], Params], tell: Callable[[int, Params, float], None]) -> float:
    """Return the best loss of 8 trials at once, where the next one starts when one has ended."""
    chance, running, values = Random(f"times {seed}"), list[tuple[float, int, Params]](), list[float]()
    now = 0.0
    for n in range(TRIALS):
        if len(running) == PARALLEL:
            now, ended, params = heapq.heappop(running)
            values.append(loss(params))
            tell(ended, params, values[-1])
        heapq.heappush(running, (now + chance.uniform(1, 2), n, ask(n)))
    return min(*values, *(loss(params) for _, _, params in running))


def of_cloudtrain(seed: int, sampler: str = "tpe") -> float:
    spec = SweepSpec.from_dict(
        {"metric": "loss", "space": SPACE, "sampler": sampler, "seed": seed, "limits": {"trials": TRIALS}}
    )
    trials: list[Trial] = []
    outcomes: dict[int, Outcome] = {}

    def ask(n: int) -> Params:
        params = propose(spec, State(limits=spec.limits, trials=tuple(trials), outcomes=outcomes)) or {}
        trials.append(Trial(n=n, run=f"s-{n}", params=params, cap={}))
        return params

    def tell(n: int, params: Params, value: float) -> None:
        outcomes[n] = Outcome(trial=n, state="succeeded", value=value)

    return best(seed, ask, tell)


def of_optuna(seed: int) -> float:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    trials: dict[int, Any] = {}

    def ask(n: int) -> Params:
        trials[n] = trial = study.ask()
        return {
            "lr": trial.suggest_float("lr", 1e-5, 1e-1, log=True),
            "dropout": trial.suggest_float("dropout", 0.0, 0.6),
            "layers": trial.suggest_int("layers", 1, 12),
            "optimizer": trial.suggest_categorical("optimizer", SPACE["optimizer"]),
        }

    return best(seed, ask, lambda n, params, value: study.tell(trials[n], value))


def of_ray(python: str, seed: int) -> float:
    with subprocess.Popen(
        [python, "-c", WITH_RAY, str(seed)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as side:
        assert side.stdin is not None
        assert side.stdout is not None
        write, read = side.stdin, side.stdout

        def send(n: int, value: float | None) -> None:
            write.write(json.dumps({"n": n, "value": value}) + "\n")
            write.flush()

        def ask(n: int) -> Params:
            send(n, None)
            found: Params = json.loads(read.readline())
            return found

        value = best(seed, ask, lambda n, params, value: send(n, value))
        write.close()
    return value


def main() -> int:
    flags = parser(__doc__, count=24, quick=24)
    flags.add_argument("--ray-python", default="", help="a Python with Ray Tune and Optuna")
    chosen = options(flags)
    sides: dict[str, Callable[[int], float]] = {
        "Optuna alone": of_optuna,
        "random": lambda seed: of_cloudtrain(seed, "random"),
    }
    if chosen.ray_python:
        sides["Ray Tune"] = partial(of_ray, chosen.ray_python)
    ours = [of_cloudtrain(seed) for seed in range(chosen.pairs)]
    figures = []
    for name, of in sides.items():
        theirs = [of(seed) for seed in range(chosen.pairs)]
        values = "; ".join(f"{mine:.4f} / {other:.4f}" for mine, other in zip(ours, theirs, strict=True))
        ratio = statistics.mean(ours) / statistics.mean(theirs)
        target = TARGET if name == "Optuna alone" else None
        figures.append(
            Figure(
                name=f"mean best loss after {TRIALS} trials, sweep / {name}", value=ratio, target=target, note=values
            )
        )
    return report(figures, as_json=chosen.json)


if __name__ == "__main__":
    sys.exit(main())
