// A small part of Markdown as elements: paragraphs, headings, lists, fenced code, `code`, **strong**, *emphasis*.
// Everything else stays text. No links, images or HTML: a model's answer cannot make the page load or run anything.
import { element } from "./dom.js";

const FENCE = /^\s*(```+|~~~+)\s*([\w+#.-]*)\s*$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const BULLET = /^\s*[-*+]\s+(.*)$/;
const NUMBERED = /^\s*(\d{1,9})[.)]\s+(.*)$/;
const INLINE = /(`+)(.+?)\1(?!`)|\*\*(?=\S)(.+?)(?<=\S)\*\*|(?<![\w*])\*(?=[^\s*])(.+?)(?<=[^\s*])\*(?![\w*])/s;

/** The elements that show `text`. */
export function renderMarkdown(text) {
  const lines = text.split("\n");
  const blocks = [];
  let index = 0;
  while (index < lines.length) {
    const [block, next] = readBlock(lines, index);
    if (block) blocks.push(block);
    index = next;
  }
  return blocks;
}

function readBlock(lines, start) {
  const line = lines[start];
  if (line.trim() === "") return [null, start + 1];
  const fence = FENCE.exec(line);
  if (fence) return readCode(lines, start, fence);
  const heading = HEADING.exec(line);
  // The page's own headings are h1 and h2; how deep an answer's are says nothing in a chat.
  if (heading) return [element("h3", {}, ...inline(heading[2])), start + 1];
  if (BULLET.test(line)) return readList(lines, start, "ul", BULLET);
  if (NUMBERED.test(line)) return readList(lines, start, "ol", NUMBERED);
  let end = start + 1;
  while (end < lines.length && !startsBlock(lines[end])) end += 1;
  return [element("p", {}, ...inline(lines.slice(start, end).join("\n"))), end];
}

function startsBlock(line) {
  return line.trim() === "" || [FENCE, HEADING, BULLET, NUMBERED].some((pattern) => pattern.test(line));
}

function readCode(lines, start, [, mark, language]) {
  let end = start + 1;
  while (end < lines.length && lines[end].trim() !== mark) end += 1; // an open block reaches to the end
  const code = element("code", {}, lines.slice(start + 1, end).join("\n"));
  const label = language ? `Code: ${language}` : "Code";
  return [element("pre", { tabindex: "0", role: "region", "aria-label": label }, code), end + 1];
}

function readList(lines, start, tag, pattern) {
  const list = element(tag);
  const first = pattern.exec(lines[start]);
  if (tag === "ol" && first[1] !== "1") list.start = Number(first[1]);
  let index = start;
  for (let match = first; match; match = index < lines.length ? pattern.exec(lines[index]) : null) {
    list.append(element("li", {}, ...inline(match.at(-1))));
    index += 1;
  }
  return [list, index];
}

function inline(text) {
  const nodes = [];
  let rest = text;
  for (let match = INLINE.exec(rest); match; match = INLINE.exec(rest)) {
    const [whole, , code, strong, emphasis] = match;
    nodes.push(rest.slice(0, match.index));
    if (code !== undefined) nodes.push(element("code", {}, code.trim()));
    else if (strong !== undefined) nodes.push(element("strong", {}, ...inline(strong)));
    else nodes.push(element("em", {}, ...inline(emphasis)));
    rest = rest.slice(match.index + whole.length);
  }
  nodes.push(rest);
  return nodes;
}
