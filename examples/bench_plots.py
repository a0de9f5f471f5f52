"""The benchmark's plots: time against batch, ratio to the matrix product, share of the measured ceilings."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# A colour a variant, the same in every plot.
COLOURS = {
    "matmul": "black",
    "op: sample": "#0072b2",
    "compiled: fused": "#56b4e9",
    "inductor: softmax+multinomial": "#d55e00",
    "inductor: race": "#e69f00",
    "inductor: gumbel": "#cc79a7",
    "flashinfer: sampling_from_logits": "#009e73",
}


def plot_all(result: dict, out: Path) -> list[Path]:
    """Writes the plots that ``result`` has data for and returns their paths."""
    shapes = list(dict.fromkeys((cell["V"], cell["D"]) for cell in result["cells"]))
    paths = [
        _grid(result, shapes, out / "time.png", "microseconds", lambda cell, us: us, log=True),
        _grid(result, shapes, out / "ratio.png", "time ÷ matmul", lambda cell, us: us / cell["us"]["matmul"], line=1.0),
    ]
    if result["ceilings"]:
        paths.append(
            _grid(result, shapes, out / "ceiling.png", "share of the measured ceiling", _share(result), line=1.0)
        )
    return [path for path in paths if path is not None]


def plot_ranks(result: dict, path: Path) -> None:
    """Time against batch, for `benchmark_tp`'s result."""
    shapes = list(dict.fromkeys((cell["V"], cell["D"]) for cell in result["cells"]))
    figure, axes = plt.subplots(1, len(shapes), figsize=(5 * len(shapes), 4), squeeze=False)
    for axis, (vocab, dim) in zip(axes.flat, shapes, strict=True):
        here = [cell for cell in result["cells"] if (cell["V"], cell["D"]) == (vocab, dim)]
        for name in here[0]["us"]:
            axis.plot([c["B"] for c in here], [c["us"][name] for c in here], marker="o", markersize=3, label=name)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set(title=f"V = {vocab}, D = {dim}", xlabel="batch", ylabel="microseconds")
        axis.grid(alpha=0.3)
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="lower center", ncols=2, frameon=False)
    env = result["environment"]
    figure.suptitle(f"{env['world']} ranks, {env['device']}, torch {env['torch']}")
    figure.tight_layout(rect=(0, 0.18, 1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _share(result: dict):
    """The larger of the share of copy bandwidth (weight bytes) and of matrix rate (2 B V D)."""
    bandwidth, rate = result["ceilings"]["bytes_per_s"], result["ceilings"]["flop_per_s"]
    width = 4 if result["dtype"] == "fp32" else 2

    def share(cell: dict, us: float) -> float:
        moved = cell["V"] * cell["D"] * width / (us * 1e-6) / bandwidth
        done = 2 * cell["B"] * cell["V"] * cell["D"] / (us * 1e-6) / rate
        return max(moved, done)

    return share


def _grid(result, shapes, path, label, value, log=False, line=None) -> Path | None:
    cells = [cell for cell in result["cells"] if "matmul" in cell["us"]]
    if not cells:
        return None
    columns = min(3, len(shapes))
    rows = -(-len(shapes) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5 * columns, 3.6 * rows), squeeze=False)
    for axis, (vocab, dim) in zip(axes.flat, shapes, strict=False):
        here = [cell for cell in cells if (cell["V"], cell["D"]) == (vocab, dim)]
        for name, colour in COLOURS.items():
            points = [(cell["B"], value(cell, cell["us"][name])) for cell in here if name in cell["us"]]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, color=colour, label=name)
        axis.set_xscale("log", base=2)
        if log:
            axis.set_yscale("log")
        if line is not None:
            axis.axhline(line, color="grey", linewidth=0.8)
        axis.set(title=f"V = {vocab}, D = {dim}", xlabel="batch", ylabel=label)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(shapes) :]:
        axis.set_visible(False)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=min(4, len(labels)), frameon=False)
    environment = result["environment"]
    figure.suptitle(f"{environment['device']}, torch {environment['torch']}, {result['dtype']}")
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
