// The legend next to the drawing, in words and numbers.

/** What the legend says: a row for each color that the mode can show. */
function legendRows(data, panel, mode) {
  const grid = mode.blocks && panel.blocks ? panel.grid : null;
  const visible = data.categories.findIndex((category) => category.role === "visible");
  const hidden = data.categories.map((category, index) => index).filter((index) => data.categories[index].role === "hidden");
  const categories = (indices) => indices.map((category) => ({ label: data.categories[category].label, cells: panel.pairs[category], category, block: null }));
  if (visible < 0) return categories(data.categories.map((_, category) => category));
  const sum = (indices) => [0, 1].map((end) => indices.reduce((total, category) => total + panel.pairs[category][end], 0));
  const terms = categories(hidden);
  const all = data.q_len * data.kv_len, [least, most] = panel.pairs[visible];
  const unseen = [all - most, all - least];
  if (!grid) {
    const whole = { label: "hidden", cells: hidden.length === 1 ? sum(hidden) : unseen, category: hidden[0], block: null };
    return [...categories([visible]), ...(mode.why && hasTerms(data) ? terms : hidden.length ? [whole] : [])];
  }
  // Cells of full blocks are visible and those of empty ones hidden, so the rest of each lies in partial blocks.
  const known = grid.counts[UNKNOWN] === 0, { cells } = grid;
  const rest = (range, whole) => (known ? range.map((count) => count - whole) : null);
  const rows = [
    { label: "visible in full blocks", cells: [cells[FULL], cells[FULL]], category: visible, block: FULL },
    { label: "visible in partial blocks", cells: rest([least, most], cells[FULL]), category: visible, block: PARTIAL },
  ];
  if (mode.why && hasTerms(data)) rows.push(...terms);
  else if (hidden.length) {
    rows.push(
      { label: "hidden in partial blocks, wasted", cells: rest(unseen, cells[EMPTY]), category: hidden[0], block: PARTIAL },
      { label: "hidden in empty blocks, skipped", cells: [cells[EMPTY], cells[EMPTY]], category: hidden[0], block: EMPTY },
    );
  }
  if (!known) rows.push({ label: "blocks of unknown kind", cells: [cells[UNKNOWN], cells[UNKNOWN]], category: visible, block: UNKNOWN });
  return rows.filter((row) => row.block === null || grid.counts[row.block] > 0);
}

/** A label that breaks between the parts of an expression rather than inside a name. */
function breakable(label) {
  return label.split(/(?<=[([,=|&])/).flatMap((part, index) => (index ? [made("wbr"), part] : [part]));
}

/** What else is to say, in lines. */
function factLines(data, panel, mode, toScale) {
  const times = ([down, across]) => `${grouped(down)} × ${grouped(across)}`;
  const lines = [`${grouped(data.q_len)} ${data.q_len === 1 ? "query" : "queries"} × ${grouped(data.kv_len)} ${data.kv_len === 1 ? "key" : "keys"}`];
  const visible = data.categories.findIndex((category) => category.role === "visible");
  if (visible >= 0) {
    const [least, most] = panel.pairs[visible].map((count) => percent(count / (data.q_len * data.kv_len)));
    lines[0] += least === most ? `, ${least} visible` : `, ${least} to ${most} visible`;
  }
  const which = [];
  if (data.batches !== 1) which.push(`sequence ${panel.batch}${data.batches ? ` of ${grouped(data.batches)}` : ""}`);
  if (data.heads !== 1) which.push(`head ${panel.head}${data.heads ? ` of ${grouped(data.heads)}` : ""}`);
  if (which.length) lines.push(which.join(", "));
  if (panel.q_offset) lines.push(`the first query stands at position ${grouped(panel.q_offset)}`);
  if (data.block_size) {
    const counts = panel.blocks ? `: ${countWords(panel.grid.counts)}` : "";
    lines.push(`${times([panel.grid.rows, panel.grid.columns])} blocks of ${times(data.block_size)}${counts}`);
  }
  if (Math.max(...data.step) > 1) lines.push(`a pixel stands for ${times(data.step)} cells`);
  if (panel.estimated && panel.estimated.includes(1)) lines.push("some shares are estimates");
  if (mode.why && hasTerms(data)) lines.push("a cell has the color of the first term that hides it");
  if (!toScale) lines.push("not to scale");
  return lines.map((line) => line[0].toUpperCase() + line.slice(1));
}
