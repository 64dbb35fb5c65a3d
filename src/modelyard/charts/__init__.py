"""Charts as SVG: lines, points, bars. They know nothing about runs."""
