"""Settings of the adversary: how far observations may be moved, how the worst move is sought, what training does about it."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

Share = Annotated[float, Field(gt=0.0, le=1.0)]
Part = Annotated[float, Field(ge=0.0, le=1.0)]


class PerturbationConfig(BaseModel):
    """A threat and the search for its worst case.

    All lengths are in the units that the networks see: standard deviations where observations are normalised.

    :param epsilon: radius of the ball around an observation, at least 0. 0.05 to 0.15 standard deviations are usual; an agent
        that is trained for more is steadier and earns less on clean data.
    :param steps: gradients that the search takes, at least 1. 3 are enough to train with, take 20 or more to judge an agent.
        Time grows in proportion.
    :param step_size: length of a step as a share of the radius; None takes 2.5 / steps, which can cross the ball.
    :param method: ``pgd`` takes `steps` steps; ``fgsm`` goes straight to the edge along one gradient, whatever `steps` says:
        faster, and weaker.
    :param norm: ``linf`` bounds every feature by itself, ``l2`` the length of the whole move.
    :param random_start: begin anywhere in the ball. At the observation itself the gradient of a KL is exactly 0, and a search
        for it that starts there finds nothing.
    :param restarts: searches of which the best counts, at least 1. More find worse cases, in as many times the time.
    :param keep_best: return the best point met and not the last one; costs one more evaluation.
    :param objective: what the adversary maximises: ``kl``, how far the policy moves (maximal action difference), which training
        looks for where the preferred choice becomes unlikely; ``value``, how bad the critics believe the situation to be;
        ``action``, how likely the least preferred action becomes, which is the least likely choice or the far end of the box.
    :param memory: what an adversary of a recurrent policy may touch. ``step``: the present observation, after a history that
        arrived intact: single bad bars. ``whole``: every observation since the rollout began, so that the recurrent state is
        perturbed as well: a feed that is wrong for long, as for a deployed agent under lasting attack.
    :param perturbable: columns that may be moved; None is all that the environment observes. What is known for certain, such as
        the calendar, own positions and flags, does not belong here.
    :param feature_scale: a factor of `epsilon` for each column of the environment's; None is 1 everywhere. 0 protects a column.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    epsilon: NonNegativeFloat = 0.075
    steps: PositiveInt = 3
    step_size: PositiveFloat | None = None
    method: Literal["pgd", "fgsm"] = "pgd"
    norm: Literal["linf", "l2"] = "linf"
    random_start: bool = True
    restarts: PositiveInt = 1
    keep_best: bool = True
    objective: Literal["kl", "value", "action"] = "kl"
    memory: Literal["step", "whole"] = "whole"
    perturbable: tuple[NonNegativeInt, ...] | None = None
    feature_scale: tuple[NonNegativeFloat, ...] | None = None

    @model_validator(mode="after")
    def _something_can_move(self) -> Self:
        if self.perturbable is not None and (not self.perturbable or len(set(self.perturbable)) != len(self.perturbable)):
            raise ValueError(f"perturbable must be different columns, at least one; got {list(self.perturbable)}")
        return self


class SAPPOConfig(PerturbationConfig):
    """State-adversarial training: a penalty on what moves the policy (SA-PPO, Zhang et al. 2020), attacked rollouts, or both.

    The penalty asks for steady actions and never sees what comes of unsteady ones. Attacked rollouts let some environments be
    played under attack: the agent meets the consequences and learns what to do about them. The search is short and its last
    point counts, since it is repeated for every minibatch or step.

    :param enabled: False trains as if there were no adversary, bit for bit. So do `epsilon` 0, and `coefficient` 0 with
        `rollouts` 0.
    :param mode: ``regularise`` leaves PPO's own loss on clean observations and adds `coefficient` times the mean of
        KL(policy(clean) || policy(perturbed)) of the same samples. ``mix`` perturbs a share of the samples inside PPO's loss
        as well, where clean and perturbed ones weigh the same.
    :param coefficient: weight of that KL, at least 0. 0.02 to 1 are usual: more is steadier and learns more slowly. 0 leaves
        attacked rollouts alone.
    :param rollouts: share of the environments, the last ones, in which the policy is shown attacked observations while it
        collects, in [0, 1]. It acts on them, they are stored, and everything is learnt from them; the environment continues
        from the true state. For a recurrent policy the present observation is moved, given the recurrent state that earlier
        moves have led to. 0.5 to 0.8 are usual: the clean environments preserve the clean return.
    :param rollout_objectives: what the adversary of the rollouts maximises, as in `objective`; one per rollout, in turn. Two
        make an agent that is not specialised in one adversary.
    :param rollout_presence: ``always`` attacks every step of these environments; ``mixed`` does so in one half of them, and in
        each of the others at a share of its steps, drawn anew for every rollout. An agent that always meets the same adversary
        can learn to read the truth from its moves, and then falls to a weaker one: one without recurrent state does.
    :param adversarial_ratio: share of the samples, or sequences, of a minibatch that are perturbed, in (0, 1]; which ones is
        drawn anew each time, and they stand for the others. 0.5 halves what the adversary costs.
    :param warmup_updates: updates at the start without an adversary, while the policy knows nothing worth protecting.
    :param schedule: how the radius goes from `epsilon` at the first update to `epsilon_final` at the last. A growing one lets
        the policy learn the task first.
    :param epsilon_final: radius at the end of the schedule; needed unless the schedule is ``constant``.
    :param schedule_share: share of the training after which the schedule ends. 0.75 leaves time to settle.
    :param max_updates: updates that the schedule counts on; None takes total_timesteps // (n_steps * n_envs).
    """

    enabled: bool = True
    mode: Literal["regularise", "mix"] = "regularise"
    coefficient: NonNegativeFloat = 0.1
    rollouts: Part = 0.0
    rollout_objectives: Annotated[tuple[Literal["kl", "action"], ...], Field(min_length=1)] = ("kl", "action")
    rollout_presence: Literal["always", "mixed"] = "always"
    adversarial_ratio: Share = 0.5
    warmup_updates: NonNegativeInt = 10
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    epsilon_final: NonNegativeFloat | None = None
    schedule_share: Share = 1.0
    max_updates: PositiveInt | None = None
    keep_best: bool = False

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.mode == "mix" and self.memory == "step":
            raise ValueError(
                'memory must be "whole" for mode="mix": a mixed batch is perturbed from its first step to its last'
            )
        if (self.schedule == "constant") != (self.epsilon_final is None):
            needs = "has none" if self.schedule == "constant" else "needs one"
            raise ValueError(f"epsilon_final is {self.epsilon_final}, but a {self.schedule} schedule {needs}")
        return self

    @property
    def idle(self) -> bool:
        """True if it can never change a training."""
        harmless = self.epsilon == 0.0 and not self.epsilon_final
        return not self.enabled or harmless or not (self.in_updates or self.rollouts)

    @property
    def in_updates(self) -> bool:
        """True if it adds to the loss, or changes the observations that the loss is computed on."""
        return self.coefficient > 0.0 or self.mode == "mix"
