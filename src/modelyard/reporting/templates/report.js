// Shows the values of the lines of a chart at the pointer.
for (const chart of document.querySelectorAll("svg.chart[data-values]")) {
  const [left, right, start, end] = chart.dataset.ends.split(" ").map(Number);
  const lines = JSON.parse(chart.dataset.values);
  const shown = chart.parentElement.appendChild(document.createElement("p"));
  shown.className = "value";
  const rule = chart.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "path"));
  rule.setAttribute("class", "pointer");
  const short = (value) => Number(value.toPrecision(5)).toString();
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * chart.viewBox.baseVal.width;
    const x = start + ((at - left) / (right - left)) * (end - start);
    let nearest = null;
    const parts = lines.map(([name, xs, ys]) => {
      let best = 0;
      xs.forEach((value, n) => { if (Math.abs(value - x) < Math.abs(xs[best] - x)) best = n; });
      nearest = nearest === null || Math.abs(xs[best] - x) < Math.abs(nearest - x) ? xs[best] : nearest;
      return `${name ? name + " " : ""}${short(ys[best])}`;
    });
    shown.textContent = `${short(nearest)}: ${parts.join(", ")}`;
    rule.setAttribute("d", `M${left + ((nearest - start) / (end - start)) * (right - left)} 34V218`);
  });
  chart.addEventListener("pointerleave", () => { shown.textContent = ""; rule.removeAttribute("d"); });
}
