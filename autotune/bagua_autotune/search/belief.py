"""The Bayesian search whose one belief also says whether the best is faster than the default.

What it believes of a configuration is an average over all likely settings of the process, with the
cost model's prediction as the prior mean; see ``process.py``. So few measurements are not taken for
more than they say, and a gain can be claimed from all that was measured in a round: what its best
was visited for, what the cost model makes of all others, and the visits to the default.

Apart from ``bayesian.py``, which it may replace: it is chosen by ``--searcher belief``.
"""

from __future__ import annotations

import math

from bagua_autotune.model.statistics import Interval
from bagua_autotune.search.bayesian import BayesianSearcher
from bagua_autotune.search.posterior import Posterior, best_posterior
from bagua_autotune.search.process import AveragedProcess
from bagua_wire.configuration import Configuration

# So many standard deviations on both sides of a mean are claimed. More than the 1.96 of a normal
# distribution: the best is chosen for being low, and visits differ by what no process knows of.
CLAIMED_DEVIATIONS = 2.2


class BeliefSearcher(BayesianSearcher):
    """See Searcher and Believes."""

    def gain(self, configuration: Configuration, default: Configuration) -> Interval:
        """See Believes."""
        if len(self._told) < 2 or configuration == default:
            return Interval(0.0, -math.inf, math.inf)
        posterior = self._posterior()
        process = posterior.process
        assert isinstance(process, AveragedProcess)  # asked for below
        one, other = posterior.points.rows([default, configuration])
        mean, deviation = process.difference(one, other)
        # By the visits to the two alone: a process may take luck for what a size does.
        told = [each.configuration for each in self._told]
        shares = sum(1 / max(told.count(side), 1) for side in (configuration, default))
        luck = process.repeat_error * math.sqrt(shares)
        reach = CLAIMED_DEVIATIONS * math.hypot(deviation, luck)
        return Interval(mean, mean - reach, mean + reach)

    def _fit(self) -> Posterior:
        return best_posterior(self._problem, self._knobs, self._told, is_averaged=True)
