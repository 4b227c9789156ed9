"""The picture of a recommendation: its names stand inside the frame."""

from __future__ import annotations

import pytest

import tunecast

pytest.importorskip("matplotlib")


def test_names_of_plans_stay_inside_the_frame() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from tunecast.plots import new_figure
    from tunecast.recommend_plot import draw_front, draw_names, labels

    found = tunecast.recommend("meta-llama/Llama-3.2-1B", gpu=["a100-sxm4-80gb", "h100-sxm5-80gb"], tokens="2M")
    figure = new_figure()
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log")
    draw_front(axes, found)
    draw_names(axes, found)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    frame = axes.get_window_extent()
    assert {text.get_text() for text in axes.texts} == set(labels(found).values())
    assert len(axes.texts) >= 2
    for text in axes.texts:
        box = text.get_window_extent(canvas.get_renderer())
        assert frame.x0 <= box.x0
        assert box.x1 <= frame.x1
