"""What the reader of an estimate must know about its numbers."""

import math

from agentrl.plan.hours import Estimate, Plan


def notes(plan: Plan, estimates: list[Estimate]) -> list[str]:
    """One sentence or two each: what does not fit, what stays idle, and where the constants come from."""
    chosen = next(e for e in estimates if e.schedule == plan.schedule)
    found = [*_cache_notes(plan, chosen), *_engine_notes(plan, chosen), *_context_notes(plan, chosen)]
    if len(estimates) < 2:
        found.append("An overlapped schedule is left out: it does not fit these GPUs.")
    found.append(f"Engine: {plan.constants.name}; assumed to hold for this model and GPU.")
    return found


def _cache_notes(plan: Plan, chosen: Estimate) -> list[str]:
    g, rollout = plan.generation, chosen.rollout
    fit = math.floor(rollout.sequences_that_fit)
    where = f"{g.tensor_parallel} x {plan.gpu.name}" if g.tensor_parallel > 1 else f"one {plan.gpu.name}"
    few = chosen.generation_gpus // g.tensor_parallel <= plan.workload.generated_episodes
    few = few and rollout.batch < min(fit, g.batch)  # fewer episodes an engine than it has room for
    if fit < g.batch:
        played = f"{rollout.batch:,.0f}, all that an engine has to play" if few else f"{rollout.batch:,.0f}"
        return [
            f"A batch of {g.batch:,} at {rollout.context:,.0f} tokens does not fit the cache of {where}: "
            f"about {fit:,} do. The first order ignores that; the calibrated estimate decodes {played}."
        ]
    if few:
        return [
            f"An engine has only {rollout.batch:,.0f} episodes to play, fewer than the batch of {g.batch:,}."
        ]
    return []


def _engine_notes(plan: Plan, chosen: Estimate) -> list[str]:
    ways, heads, found = plan.generation.tensor_parallel, plan.shape.num_heads, list[str]()
    num_engines, left = divmod(chosen.generation_gpus, ways)
    episodes = math.ceil(plan.workload.generated_episodes)
    if episodes < num_engines:
        found.append(
            f"{num_engines:,} engines have {episodes:,} episodes a step to play, so "
            f"{num_engines - episodes:,} of them stay idle while the others generate."
        )
    if left:
        found.append(
            f"Engines of {ways} GPUs (--tensor-parallel {ways}) use {num_engines * ways} of "
            f"{chosen.generation_gpus} GPUs; the other {left} generate nothing."
        )
    if heads % ways:
        found.append(
            f"--tensor-parallel {ways} does not divide the {heads} attention heads of {plan.shape.name}; "
            "engines refuse to split it so."
        )
    return found


def _context_notes(plan: Plan, chosen: Estimate) -> list[str]:
    context, tokens = chosen.rollout.context, plan.workload.tokens
    if context <= tokens:
        return []
    if plan.generation.context is not None:
        return [f"--context ({context:,.0f}) is more than an episode's {tokens:,.0f} tokens."]
    cause = f"--length-cv {plan.workload.length_cv:g}" if plan.lengths is None else "the measured lengths"
    return [
        f"Decoding happens at {context:,.0f} tokens of context on average, more than the mean episode's "
        f"{tokens:,.0f}: the longest episodes take most of the steps ({cause})."
    ]
