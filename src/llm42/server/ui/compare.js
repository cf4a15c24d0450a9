// Comparing two completions exactly. Pure: no page, no network.
//
// JSON carries a log-probability in the fewest digits that name one double, so equal numbers here are equal bits there.

/**
 * Compare two completions of `streamChat`.
 *
 * Returns {complete, equal, token, logprob, numLogprobs, character}: `token`, `logprob` and `character` are the first
 * differing positions or null; `numLogprobs` counts positions whose log-probabilities differ or exist once only.
 * `complete` says whether both carry tokens and a log-probability for each; without that nothing can be `equal`.
 */
export function compare(first, second) {
  const complete = [first, second].every(
    ({ tokenIds, logprobs }) => tokenIds.length > 0 && logprobs.length === tokenIds.length,
  );
  const token = firstDifference(first.tokenIds, second.tokenIds);
  const logprob = firstDifference(first.logprobs, second.logprobs);
  const character = firstDifference([...first.text], [...second.text]);
  const length = Math.max(first.logprobs.length, second.logprobs.length);
  let numLogprobs = 0;
  for (let index = 0; index < length; index += 1) {
    if (!Object.is(first.logprobs[index], second.logprobs[index])) numLogprobs += 1;
  }
  const same = token === null && logprob === null && character === null;
  const ended = first.finishReason === second.finishReason;
  return { complete, equal: complete && same && ended, token, logprob, numLogprobs, character };
}

function firstDifference(first, second) {
  const length = Math.max(first.length, second.length);
  for (let index = 0; index < length; index += 1) {
    if (!Object.is(first[index], second[index])) return index;
  }
  return null;
}
