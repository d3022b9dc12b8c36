"""Into which pieces a rollout may be cut."""

from typing import cast

from tailguard.ppo.policy import DistributionalPolicy
from tailguard.ppo.update import require_fitting


class Batches:
    """What :class:`DistributionalPPO` knows about the sizes of its batches. The names below are the model's."""

    policy: DistributionalPolicy
    n_steps: int
    n_envs: int
    batch_size: int | None
    microbatch_size: int | None

    def _check_batches(self) -> None:
        """Refuse batch sizes that do not fit the rollout, with the nearest that does."""
        samples = self.n_steps * self.n_envs
        if self.batch_size is None:
            quarter = max(self.n_envs // 4, 1) * self.n_steps if self.policy.recurrent else max(samples // 4, 1)
            self.batch_size = quarter if samples % quarter == 0 else samples
        require_fitting("batch_size", self.batch_size, samples, self._unit)
        require_fitting("microbatch_size", self._microbatch_size(), self.batch_size, self._unit)

    @property
    def _unit(self) -> int:
        """The steps that cannot be torn apart: a sequence, or a single one."""
        return self.n_steps if self.policy.recurrent else 1

    def _microbatch_size(self) -> int:
        return cast(int, self.batch_size) if self.microbatch_size is None else self.microbatch_size
