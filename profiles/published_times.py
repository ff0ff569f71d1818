"""Published collectives as the cost model predicts them, by row id (kernels: `short_runs`)."""

from __future__ import annotations

from collections.abc import Sequence

from claw_plan.profiles.cluster import Cluster
from claw_plan.profiles.cost import CostModel
from claw_plan.profiles.cost_model import ClusterCostModel
from claw_plan.profiles.published_rows import CollectiveRow


def collective_times_ns(rows: Sequence[CollectiveRow]) -> dict[str, float]:
    """The time of each collective on idle links, as far as its row gives it."""
    costs = _Costs()
    return {
        row.id: costs.of(row.cluster).collective(row.work).alone_ns * row.time_share
        for row in rows
    }


class _Costs:
    """One cost model for each cluster; rows of one kind of hardware share the object."""

    def __init__(self) -> None:
        self._models: dict[int, CostModel] = {}

    def of(self, cluster: Cluster) -> CostModel:
        """The cost model of a cluster that somebody else keeps alive."""
        model = self._models.get(id(cluster))
        if model is None:
            model = self._models[id(cluster)] = ClusterCostModel(cluster)
        return model
