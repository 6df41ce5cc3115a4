"""What `agentrl plan --json` prints."""

import math
from dataclasses import asdict
from typing import Any

from agentrl.cli.plan_output import Answer
from agentrl.plan.advice import Uncertainty
from agentrl.plan.models import logits_bytes
from agentrl.plan.rollout import Rollout
from agentrl.plan.roofline import StepHours


def as_json(answer: Answer) -> dict[str, Any]:
    """The answer for programs; units end every name."""
    p = answer.plan
    return {
        "model": p.shape.name,
        "gpu": p.gpu.name,
        "gpu_source": p.gpu.source,
        "gpus": p.gpus,
        "engine": p.constants.name,
        "context_tokens": answer.context,
        "first_order": _hours_json(answer.first_order, p.workload.steps),
        "calibrated": [
            {
                "schedule": e.schedule,
                **_hours_json(e.step_hours, e.steps),
                "step_seconds": e.step_seconds,
                "generation_gpus": e.generation_gpus,
                "train_gpus": e.train_gpus,
                "train_tokens_per_second_per_gpu": e.train_tokens_per_second,
                "rollout": _rollout_json(e.rollout),
            }
            for e in answer.estimates
        ],
        "rates_per_gpu": [asdict(rate) for rate in answer.rates()],
        "kv_bytes_per_token": p.shape.kv_bytes_per_token(p.generation.kv_bytes_each),
        "fixed_bytes_per_sequence": p.shape.fixed_sequence_bytes(p.generation.kv_bytes_each),
        "logits_bytes_per_token": logits_bytes(1, p.shape.vocab_size),
        "memory_bytes": {**dict(answer.memory.items()), "total": answer.memory.total},
        "memory_limit_bytes": answer.memory_limit_bytes,
        "largest_microbatch_tokens": answer.largest_microbatch,
        "memory_variants": [
            {
                "name": v.name,
                "memory_bytes": {**dict(v.memory.items()), "total": v.memory.total},
                "largest_microbatch_tokens": v.largest_microbatch,
            }
            for v in answer.memory_variants()
        ],
        "savings": [asdict(saving) for saving in answer.savings],
        "uncertainties": [_uncertainty_json(answer, uncertainty) for uncertainty in answer.uncertainties],
        "notes": answer.notes,
        "assumptions": [asdict(assumption) for assumption in answer.assumptions],
    }


def _hours_json(hours: StepHours, steps: int) -> dict[str, Any]:
    return {
        "step_gpu_hours": {**dict(hours.items()), "total": hours.total},
        "run_gpu_hours": steps * hours.total,
        "decode_share": hours.decode_share,
    }


def _rollout_json(rollout: Rollout) -> dict[str, float]:
    return {
        "seconds": rollout.seconds,
        "decode_seconds": rollout.decode_seconds,
        "prefill_seconds": rollout.prefill_seconds,
        "sequences_in_flight": rollout.batch,
        "sequences_that_decode": rollout.decoding,
        "sequences_that_fit": rollout.sequences_that_fit,
        "context_tokens": rollout.context,
        "tokens_per_second_per_engine": rollout.tokens_per_second,
        "busy_share": rollout.busy,
    }


def _uncertainty_json(answer: Answer, uncertainty: Uncertainty) -> dict[str, Any]:
    unit = next(a.unit for a in answer.assumptions if a.flag == uncertainty.flag)
    trials = {
        name: {
            "value": trial.value,
            "how": trial.how,
            "run_gpu_hours": trial.gpu_hours if math.isfinite(trial.gpu_hours) else None,  # not possible
        }
        for name, trial in (("low", uncertainty.low), ("high", uncertainty.high))
    }
    what = {"assumption": uncertainty.assumption, "flag": uncertainty.flag, "unit": unit}
    return {**what, "value": uncertainty.value, **trials}
