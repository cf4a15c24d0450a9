// One streamed completion: what was asked, what came. Shared by the chat and by the comparison.
import { readEvents, send } from "./api.js";

/**
 * POST a chat completion and gather its stream. `onProgress(completion)` is called after every chunk.
 *
 * Returns {text, tokenIds, logprobs, pieces, seed, fingerprint, finishReason, usage, seconds}: `logprobs[i]` and the
 * text `pieces[i]` belong to `tokenIds[i]` if the request asked for log-probabilities and token ids.
 */
export async function streamChat(body, { requestId, signal, onProgress = () => {} }) {
  const started = performance.now();
  const completion = {
    text: "",
    tokenIds: [],
    logprobs: [],
    pieces: [],
    seed: null,
    fingerprint: null,
    finishReason: null,
    usage: null,
    seconds: 0,
  };
  const decoder = new TextDecoder();
  const whole = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await send("v1/chat/completions", { body: whole, signal, requestId });
  for await (const chunk of readEvents(response)) {
    completion.seconds = (performance.now() - started) / 1000;
    completion.fingerprint = chunk.system_fingerprint ?? completion.fingerprint;
    completion.usage = chunk.usage ?? completion.usage;
    for (const choice of chunk.choices) add(completion, choice, decoder);
    onProgress(completion);
  }
  return completion;
}

function add(completion, choice, decoder) {
  completion.text += choice.delta?.content ?? "";
  completion.tokenIds.push(...(choice.token_ids ?? []));
  for (const { token, bytes, logprob } of choice.logprobs?.content ?? []) {
    // A token may hold part of a character only; the decoder keeps that part for the next token.
    completion.pieces.push(bytes ? decoder.decode(new Uint8Array(bytes), { stream: true }) : token);
    completion.logprobs.push(logprob);
  }
  completion.seed = choice.seed ?? completion.seed;
  completion.finishReason = choice.finish_reason ?? completion.finishReason;
}

const REASONS = { stop: null, length: "cut at max tokens", abort: "aborted by the server", error: "failed" };

/**
 * The figures of an answer as {text: [before, value, after], explanation}; what the server did not say is left out.
 *
 * `value` is the part that stands out: ["", 12, " tokens"], ["seed ", "42", ""].
 */
export function figures({ usage, seconds, seed, fingerprint, finishReason, tokenIds }) {
  const tokens = usage?.completion_tokens ?? tokenIds.length;
  const { windows, rollbacks, recomputed_tokens: recomputed, cached_tokens: cached } = usage?.llm42 ?? {};
  const rate = seconds > 0 ? (tokens / seconds).toFixed(1) : null;
  const ended = finishReason in REASONS ? REASONS[finishReason] : finishReason;
  const all = [
    ["", tokens, " tokens", "Tokens of the answer"],
    ["", rate, " tok/s", "From sending the request to its last token"],
    ["", windows, " windows", "Windows of candidates that were verified"],
    ["", rollbacks, " rollbacks", "Windows in which a candidate was wrong"],
    ["", recomputed, " recomputed", "Candidates that were dropped and decoded again"],
    ["", cached, " cached", "Prompt tokens found in the prefix cache"],
    ["", ended, "", "Why the answer ended"],
    ["seed ", seed, "", "Sent again with the same request, it gives the same answer"],
    ["contract ", fingerprint, "", "system_fingerprint: everything that may change bits"],
  ];
  const known = all.filter(([, value]) => value !== null && value !== undefined);
  return known.map(([before, value, after, explanation]) => ({ text: [before, String(value), after], explanation }));
}
