"""The tokenizer over HTTP: what clients count and cut with is what the model reads."""

from __future__ import annotations

import httpx2
import pytest

CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def http(server):
    with httpx2.Client(base_url=server.url) as client:
        yield client


def test_text_goes_to_ids_and_back(http, server):
    text = "Grüße aus Köln, 12 tokens?"
    answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == server.llm.tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) > 0
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}


def test_a_conversation_has_the_ids_that_a_chat_runs_with(http, client):
    tokens = http.post("/tokenize", json={"messages": CHAT}).json()["tokens"]
    answer = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=1, extra_body={"return_token_ids": True}
    )
    assert answer.prompt_token_ids == tokens != []


def test_the_tokenizer_describes_itself_as_remote_tokenizers_expect(http, server):
    info = http.get("/tokenizer_info").json()
    assert http.post("/tokenize", json={"prompt": info["eos_token"]}).json()["tokens"] == info["eos_token_ids"]
    assert info["chat_template"] == server.llm.tokenizer.chat_template
    assert info["vocab_size"] == server.llm.tokenizer.vocab_size


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "prompt or messages must be given"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "and not both"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "'other' is not served here"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1] must be in 0.."),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(http, path, body, message):
    response = http.post(path, json=body)
    assert response.status_code in {400, 404}
    assert message in response.json()["error"]["message"]
