// Sorts a table by the column whose head is clicked. Cells without a value come last.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.querySelectorAll("thead th")];
  const valueOf = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
  const isEmpty = (value) => value === "" || value === "–";
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...table.tBodies[0].rows].map((row) => [valueOf(row, column), row]);
      rows.sort(([a], [b]) => {
        if (isEmpty(a) || isEmpty(b)) return isEmpty(a) - isEmpty(b);
        const order = isFinite(a) && isFinite(b) ? a - b : a.localeCompare(b);
        return up ? order : -order;
      });
      table.tBodies[0].append(...rows.map(([, row]) => row));
    });
  });
}
