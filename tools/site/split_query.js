// Split a query into words of the index: from the left, the longest word that the index has.
// Sphinx puts this into its search, in place of its own splitQuery().
var splitQuery = (query) => {
  const terms = [Search._index.terms, Search._index.titleterms];
  const has = (word) => terms.some((words) => Object.hasOwn(words, word));
  const longest = (text) => {
    for (let end = text.length; end > 1; end--) {
      if (has(text.slice(0, end))) return text.slice(0, end);
    }
    return "";
  };
  const words = [];
  // Chinese characters in a row, or letters and digits in a row.
  const parts = /[\u4e00-\u9fff]+|[^\u4e00-\u9fff\P{L}]+[\p{N}_]*|[\p{N}_]+/gu;
  for (const [part] of query.matchAll(parts)) {
    if (!/[\u4e00-\u9fff]/.test(part)) {
      words.push(part);
      continue;
    }
    for (let rest = part; rest; ) {
      const word = longest(rest);
      if (word) words.push(word);
      rest = rest.slice(word.length || 1);
    }
  }
  return words;
};
