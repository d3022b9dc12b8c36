"""What the policy is trained on: rewards, and the value of a state, as the objective sees them.

The critics always learn the law of the plain return. An objective turns a rollout's rewards into those that the policy is paid,
and the critics' laws into the values that go with them; advantages follow from the two.
"""

from torch import Tensor

from tailguard.ppo.rollout import Rollout


class NeutralObjective:
    """The expected return: rewards as they are, and the mean of each law."""

    def rewards(self, rollout: Rollout) -> Tensor:
        """What the policy is paid for each step, ``[T, B]``."""
        return rollout.rewards

    def values(self, atoms: Tensor, masses: Tensor) -> Tensor:
        """The value of each state by each critic, from raw atoms ``[K, L, B, M]``, as ``[K, L, B]``."""
        return atoms @ masses
