
for (const field of document.querySelectorAll("input[data-filter]")) {
  const rows = [...document.getElementById(field.dataset.filter).tBodies[0].rows].map(row => [row, row.textContent.toLowerCase()]);
  const shown = document.getElementById(field.dataset.filter + "-shown");
  const apply = () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const [row, text] of rows) {
      row.hidden = !words.every(word => text.includes(word));
      count += row.hidden ? 0 : 1;
    }
    shown.textContent = count + " of " + rows.length + " rows";
  };
  field.addEventListener("input", apply);
  apply();
}
