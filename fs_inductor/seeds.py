"""Seeds of our calls: views of what one launch draws."""

from __future__ import annotations

from pathlib import Path

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph

aten = torch.ops.aten
prims = torch.ops.prims


class SeedViews(CustomGraphPass):
    """Inductor's `joint_custom_post_pass`.

    Inductor lets one launch draw all seeds of a graph, ours and those of its own random ops, and looks each of them up.
    Its own kernels do so themselves, but for a call of ours that would be a launch more, which copies one number.
    Seeds drawn apart from Inductor's would not do: the partitioner takes `inductor_seeds` of equal sizes for the same.
    """

    def __call__(self, graph: Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=prims.inductor_lookup_seed.default):
            if all(getattr(user.target, "namespace", "") == "flashsampling" for user in node.users):
                seeds, index = node.args
                node.target, node.args = aten.select.int, (seeds, 0, index)
                node.meta["val"] = seeds.meta["val"].select(0, index)

    def uuid(self) -> bytes:
        return get_hash_for_files((str(Path(__file__)),))
