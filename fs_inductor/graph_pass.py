"""The graph pass: for each sink, recognise, check, rewrite, report."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import CallFunctionVarArgs, Match, PatternMatcherPass, register_graph_pattern
from torch.fx import Graph, Node

from . import gain, traffic
from .options import Options
from .recognise.dtensor_random import rewrap, unwrap
from .recognise.gather import GatherStep
from .recognise.miss import Miss
from .recognise.shapes import shape
from .recognise.tails import SINK_TARGETS, Site, recognise
from .recognise.together import Group, group_sites
from .report import Called, Fused, Missed, NotFusedError, Report, location_of
from .rewrite import erase, rewrite
from .tuning import tune_calls

log = logging.getLogger(__name__)

aten = torch.ops.aten


class FlashSamplingPass(CustomGraphPass):
    """Inductor's `joint_custom_pre_pass`. Records accumulate in ``report``: the pass runs once per (sub)graph.

    guards: a batch limit may be guarded (`gain.may_guard`).
    """

    def __init__(self, options: Options, report: Report | None = None, guards: bool = True):
        self.options = options
        self.report = Report() if report is None else report
        self.guards = guards

    def __call__(self, graph: Graph) -> None:
        called = [Called(_name(node), location_of(node)) for node in graph.nodes if _is_ours(node)]
        wrapped = unwrap(graph)
        found = {sink: self._recognise(sink) for sink in find_sinks(graph)}
        found = {sink: result for sink, result in found.items() if result is not None}
        missed = {sink: miss for sink, miss in found.items() if isinstance(miss, Miss)}
        sites = [site for site in found.values() if isinstance(site, Site)]
        try:
            groups, escaped = group_sites(sites, set(found))
        except Exception as error:
            log.exception("comparing the sites failed")
            groups, escaped = [], dict.fromkeys((site.sink for site in sites), _internal(error))
        missed |= escaped
        for group in groups:
            miss = _no_gain(group, self.options, self.guards)
            if miss is not None:
                missed |= dict.fromkeys((site.sink for site in group.sites), miss)
        groups = [group for group in groups if group.sites[0].sink not in missed]
        fused: dict[Node, Fused] = {}
        rewritten: list[Site] = []
        replaced: dict[Node, Node] = {}
        for group in groups:
            try:
                calls = rewrite(graph, group, replaced)
            except Exception as error:
                if not isinstance(error, Miss):
                    log.exception("rewriting %s failed", group.sites[0].sink)
                miss = error if isinstance(error, Miss) else _internal(error)
                missed |= {site.sink: miss for site in group.sites}
                continue
            rewritten += group.sites
            fused |= {site.sink: _fused_record(site, calls[site]) for site in group.sites}
        if rewritten:
            erase(graph, rewritten)
        rewrap(graph, wrapped)
        if rewritten:
            graph.lint()
            if inductor_config.max_autotune or inductor_config.max_autotune_gemm:
                tune_calls(graph)
        in_order = [sink for sink in found if sink in missed]
        self._record(called, [fused[sink] for sink in found if sink in fused], [(s, missed[s]) for s in in_order])

    def _recognise(self, sink: Node) -> Site | Miss | None:
        """The site of ``sink`` if it may be fused by itself, or why not; None if it is no sink after all."""
        try:
            site = recognise(sink)
            if site is not None:
                check(site, self.options)
            return site
        except Miss as miss:
            return miss
        except Exception as error:  # whatever a strange graph does to us, it must still compile
            log.exception("recognising %s failed", sink)
            return _internal(error)

    def uuid(self) -> bytes:
        """Changes with every source file of the compiler and device sides, with the options, and with ``guards``: torch
        takes a cached graph's guards over into a graph with declared bounds, and fails."""
        return get_hash_for_files(_sources(), repr((self.options, self.guards)))

    def _record(self, called: list[Called], fused: list[Fused], missed: list[tuple[Node, Miss]]) -> None:
        records = [Missed(_name(sink), location_of(sink), miss.code, miss.reason, miss.hint) for sink, miss in missed]
        for record in (*called, *fused, *records):
            log.info("%s", record)
        self.report.graphs += 1
        self.report.called += called
        self.report.fused += fused
        self.report.missed += records
        if self.options.strict and any(not self._is_bystander(sink, miss) for sink, miss in missed):
            raise NotFusedError(self.report)

    def _is_bystander(self, sink: Node, miss: Miss) -> bool:
        """An argmax over something small that no linear computes (a router's, say): no LM head that strict is about."""
        if miss.code != "NO_LINEAR" or sink.target is aten.multinomial.default:
            return False
        sizes = shape(sink.args[0])
        smallest = self.options.rule(sink.args[0].meta["val"].device.type).min_vocab
        return all(isinstance(size, int) for size in sizes) and max(sizes, default=1) < smallest


# -- anchors ------------------------------------------------------------------------------------------------------


def find_sinks(graph: Graph) -> list[Node]:
    """The graph's sampling ops, in graph order, found with Inductor's pattern matcher."""
    _found.clear()
    try:
        _anchors().apply(graph)
        found = set(_found)
    finally:
        _found.clear()
    # The matcher passes over meta tensors. A step on them is a miss all the same, not a step without sampling.
    sinks = [node for node in graph.nodes if node.target in SINK_TARGETS]
    return [node for node in sinks if node in found or any(map(_is_meta, node.all_input_nodes))]


def _is_meta(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_meta


# Handlers have no return value; compilation of one graph runs under Dynamo's lock.
_found: list[Node] = []


@functools.cache
def _anchors() -> PatternMatcherPass:
    anchors = PatternMatcherPass(pass_name="flashsampling_anchors")

    @register_graph_pattern(CallFunctionVarArgs(list(SINK_TARGETS)), pass_dict=anchors)
    def collect(match: Match, *args: Any, **kwargs: Any) -> None:
        _found.append(match.output_node())

    return anchors


# -- checks: may this site be fused? ------------------------------------------------------------------------------


def check(site: Site, options: Options) -> None:
    """What concerns one site alone.

    Raises:
        Miss: why the site may not be fused.
    """
    logits = site.linear.node.meta["val"]
    device = logits.device.type
    if device not in ("cpu", "cuda"):
        raise Miss("DEVICE", f"the LM head is on device type {device!r}", "use a CPU or a CUDA device", site.sink)
    if site.draws and inductor_config.fallback_random:
        raise Miss(
            "FALLBACK_RANDOM",
            "fallback_random=True asks for eager's random numbers, and a fused draw has its own",
            "unset torch._inductor.config.fallback_random to fuse draws; greedy sinks are fused either way",
            site.sink,
        )
    if site.gather is not None and not options.tp:
        raise Miss(
            "TP_LAYOUT",
            "the vocabulary is sharded over ranks, and flashsampling.tp is False",
            "set options={'flashsampling.tp': True}, the default, on all ranks",
            site.sink,
        )
    sizes = shape(site.sink.args[0])
    if site.gather is not None and not isinstance(sizes[site.sink_dim], int):
        raise Miss(
            "TP_LAYOUT",
            "the size of the sharded vocabulary is not known at compile time",
            "let only the batch be dynamic",
            site.sink,
        )
    gain.check_vocab(sizes, site.sink_dim, options.rule(device), site.sink)


def _no_gain(group: Group, options: Options, guards: bool) -> Miss | None:
    """The miss for a group that would not pay at the batch it is compiled for."""
    linear = group.sites[0].linear.node
    operand = group.sites[0].linear.left.meta["val"]
    rule = options.rule(operand.device.type, operand.dtype)
    if rule.max_batch is None:
        return None
    one_call = len(group.calls) == 1
    try:
        for sites in [group.sites] if one_call else [[site] for site in group.sites]:
            moved = traffic.of(sites).per_head(len(sites[0].heads))
            gain.check_batch(moved, rule, sites[0].gather is not None, linear, guards)
    except Miss as miss:
        return miss
    return None


def _internal(error: Exception) -> Miss:
    return Miss(
        "INTERNAL",
        f"the pass failed with {type(error).__name__}: {error}",
        "please report this with the traceback in the log; the graph was compiled unfused",
    )


# -- records ------------------------------------------------------------------------------------------------------


def _name(node: Node) -> str:
    return str(node.target).removesuffix(".default")


def _is_ours(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "flashsampling"


def _fused_record(site: Site, call: Node) -> Fused:
    hidden = call.args[0].meta["val"]
    moved = traffic.of([site])
    saved, unfused = moved.saved, moved.known(moved.unfused)
    return Fused(
        _name(site.sink),
        location_of(site.sink),
        _name(call),
        site.program,
        int(saved) if saved.is_Integer else saved,
        int(unfused) if unfused.is_Integer else unfused,
        _exchange(site.gather, hidden.device) if site.gather is not None else "",
        len(site.heads),
    )


def _exchange(gather: GatherStep, device: torch.device) -> str:
    from .kernels import exchange

    return exchange.describe(gather.group, device)


@functools.cache
def _sources() -> tuple[str, ...]:
    here = Path(__file__).parent
    return tuple(sorted(str(p) for folder in (here, here / "recognise", here / "kernels") for p in folder.glob("*.py")))


Pass = Callable[[Graph], None]


class PassSequence(CustomGraphPass):
    """Several passes as one, since torch 2.11 takes a single `joint_custom_pre_pass` and later versions a list."""

    def __init__(self, passes: Iterable[Pass]):
        self.passes = tuple(passes)

    def __call__(self, graph: Graph) -> None:
        for each in self.passes:
            each(graph)

    def uuid(self) -> Any:
        """None, which turns Inductor's cache off, as soon as one pass has no uuid."""
        ids = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self.passes]
        return None if None in ids else tuple(ids)
