"""Answers from a server that speaks OpenAI's protocol (vLLM, SGLang, llama.cpp, ...): many requests at once, retried.

Each request has a seed of its own, made of the run's seed and the row's id, so the order in which answers come back
changes nothing. What a server refuses (400) is dropped and named; what it fails at (429, 5xx, timeouts, broken answers)
is asked again, and if that does not help left for the next run; a server that is gone or set up otherwise ends the run.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import httpx
from transformers import PreTrainedTokenizerBase

from headstart.train.answers import Answer, Asked, Done, number
from headstart.train.conversations import Conversation, Messages, Refused, Report, message_of
from headstart.train.masking import MaskError, prompt_ids, render
from headstart.train.template import spelled

REFUSED = {400, 413, 422}  # this request, whoever asks
PASSING = {408, 409, 425, 429, 500, 502, 503, 504, 529}
LONGEST_WAIT = 60.0  # seconds between two tries
PATIENCE = 8  # rows in a row that came to nothing before the run ends
LATER = "the server did not answer; left for the next run: "


class ServerError(OSError):
    """The server cannot be worked with; the text says what it answered and what to do."""


class _Failed(Exception):
    """One request came to nothing; `again`: another try may help, not before `wait` seconds."""

    def __init__(self, reason: str, again: bool, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.again, self.wait = again, wait


class Server:
    """Answers prompts through /chat/completions, and goes on with raw prompts through /completions."""

    def __init__(
        self,
        url: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        target_id: str,
        model: str | None = None,
        max_new_tokens: int = 256,
        concurrency: int = 32,
        timeout: float = 600.0,
        retries: int = 6,
        backoff: float = 0.5,
        api_key: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> None:
        """url: up to /v1, as http://localhost:8000/v1. tokenizer: the target's, for lengths and its template. model:
        the name it is served under, target_id unless given. timeout: seconds a request. retries: further tries of a
        request, the first after `backoff` seconds, each later one after twice as long. body: further fields of each
        request."""
        if max_new_tokens < 1 or concurrency < 1 or retries < 0:
            given = f"max_new_tokens {max_new_tokens}, concurrency {concurrency}, retries {retries}"
            raise ValueError(f"{given}; expected at least one token, one request at a time and no negative retries")
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"the server is {url!r}; expected an address such as http://localhost:8000/v1")
        self.url, self.tokenizer, self.template_kwargs = url.rstrip("/"), tokenizer, dict(template_kwargs or {})
        self.target_id, self.model, self.max_new_tokens = target_id, model or target_id, max_new_tokens
        self.concurrency, self.timeout, self.retries, self.backoff = concurrency, timeout, retries, backoff
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.body = dict(body or {})
        self.notes: dict[str, Any] = {"served_model": self.model, "concurrency": concurrency}

    def identity(self) -> dict[str, Any]:
        """What the answers depend on besides the sampling and the template; the server's address may change."""
        return {"target": self.target_id, "answered": "by a server", "request": self.body}

    def check(self, prompt: Conversation) -> int:
        """Tokens of a prompt. Raises MaskError where the template refuses it."""
        return len(self._ids(prompt, prompt.messages))

    def answer(self, asked: Sequence[Asked], done: Done, more: Callable[[], bool], report: Report, seed: int) -> None:
        """Answers prompts, `concurrency` at a time, and hands each to `done`, until `more` says no.

        Raises ServerError where the server is gone, refuses the key, does not have the model or refuses every prompt.
        """
        asyncio.run(self._answer_all(asked, done, more, report, seed))

    def complete(
        self, prompt: Sequence[int], count: int, *, closer: str, max_new_tokens: int, temperature: float, seed: int
    ) -> list[tuple[str, bool]]:
        """`count` continuations of one prompt, up to an end token or the text `closer`: (text, came to an end)."""
        return asyncio.run(self._complete_all(list(prompt), count, closer, max_new_tokens, temperature, seed))

    async def _answer_all(
        self, asked: Sequence[Asked], done: Done, more: Callable[[], bool], report: Report, seed: int
    ) -> None:
        waiting = iter(sorted(asked, key=lambda one: number(seed, one.key)))  # cut short, it is a fair sample

        async def work(client: httpx.AsyncClient, desk: _Desk) -> None:
            for one in waiting:
                if not more():
                    return
                try:
                    answer = await self._answer(client, one, report, number(seed, one.key))
                except _Failed as error:
                    await desk.failed(one, error)
                else:
                    desk.answered(one, answer)

        try:
            async with self._client() as client:
                desk = _Desk(done, report, lambda: self._takes_any(client))
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(self.concurrency, len(asked))):
                        group.create_task(work(client, desk))
                await desk.close()
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from several

    async def _answer(self, client: httpx.AsyncClient, one: Asked, report: Report, seed: int) -> Answer:
        """One conversation turn by turn; it ends early where an answer is cut off, empty, or calls a tool."""
        answer, waiting = Answer([], True, 0), list(one.prompt.messages)
        while waiting and answer.finished and not answer.dropped:
            head = next(i for i, m in enumerate(waiting) if m["role"] == "user") + 1
            messages, waiting = answer.messages + waiting[:head], waiting[head:]
            request: dict[str, Any] = {"messages": [_sent(m) for m in messages], "max_tokens": self.max_new_tokens}
            request["seed"] = seed % 2**31
            arguments = self.template_kwargs | (one.prompt.template_kwargs or {})
            request |= {"chat_template_kwargs": arguments} if arguments else {}
            request |= {"tools": one.prompt.tools} if one.prompt.tools else {}
            choice, usage = await self._post(client, "/chat/completions", request, one.temperature)
            message = _received(choice.get("message"))
            if usage.get("prompt_tokens") not in (None, len(self._ids(one.prompt, messages))):
                report.change("the server's prompt has another length than this template gives it", one.key)
            finished = choice.get("finish_reason") not in ("length", "content_filter", None)
            tokens = answer.tokens + int(usage.get("completion_tokens") or 0)
            answer = Answer([*messages, message], finished, tokens, self._fault(one.prompt, [*messages, message]))
            if "tool_calls" in message:
                break
        return answer

    async def _takes_any(self, client: httpx.AsyncClient) -> bool:
        """Whether the server answers the plainest of prompts with these settings."""
        request: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": self.max_new_tokens}
        request |= {"chat_template_kwargs": self.template_kwargs} if self.template_kwargs else {}
        try:
            await self._post(client, "/chat/completions", request, 1.0)
        except _Failed:
            return False
        return True

    def _fault(self, prompt: Conversation, messages: Messages) -> str:
        """Why the last answer is no use, or ""."""
        if not messages[-1]["content"].strip() and "tool_calls" not in messages[-1]:
            return "the answer is empty"
        arguments = self.template_kwargs | (prompt.template_kwargs or {})
        try:
            render(messages, self.tokenizer, template_kwargs=arguments, tools=prompt.tools)
        except MaskError as error:
            return str(error).split("; rendered:")[0]
        return ""

    def _ids(self, prompt: Conversation, messages: Messages) -> list[int]:
        arguments = self.template_kwargs | (prompt.template_kwargs or {})
        return prompt_ids(messages, self.tokenizer, template_kwargs=arguments, tools=prompt.tools)

    async def _complete_all(
        self, prompt: list[int], count: int, closer: str, length: int, temperature: float, seed: int
    ) -> list[tuple[str, bool]]:
        limit = asyncio.Semaphore(self.concurrency)

        async def one(client: httpx.AsyncClient, index: int) -> tuple[str, bool]:
            request = {"prompt": prompt, "max_tokens": length, "seed": number(seed, str(index)) % 2**31}
            request |= {"stop": [closer]} if closer else {}
            async with limit:
                try:
                    choice, _ = await self._post(client, "/completions", request, temperature)
                except _Failed as error:
                    raise ServerError(f"{self.url}/completions: {error}") from error
            text = str(choice.get("text") or "")
            return (text.split(closer)[0] if closer else text), choice.get("finish_reason") == "stop"

        async with self._client() as client:
            return list(await asyncio.gather(*(one(client, index) for index in range(count))))

    def _client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=self.concurrency)
        return httpx.AsyncClient(timeout=self.timeout, headers=self.headers, limits=limits)

    async def _post(
        self, client: httpx.AsyncClient, path: str, request: dict[str, Any], temperature: float
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The first choice and the usage in the reply to one request, tried again as long as that may help."""
        request = {"model": self.model, **request, "temperature": temperature, "top_p": 1.0, **self.body}
        for attempt in range(self.retries + 1):
            try:
                return await self._once(client, path, request)
            except _Failed as error:
                if not error.again or attempt == self.retries:
                    raise
                pause = min(LONGEST_WAIT, self.backoff * 2**attempt) * random.uniform(0.5, 1.0)  # not all at once
                await asyncio.sleep(max(pause, error.wait))
        raise AssertionError("the last try returns or raises")

    async def _once(
        self, client: httpx.AsyncClient, path: str, request: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        try:
            reply = await client.post(self.url + path, json=request)
        except httpx.HTTPError as error:
            raise _Failed(f"{type(error).__name__} {error}".strip(), again=True) from error
        if reply.status_code == 200:
            return _opened(reply)
        reason = f"{reply.status_code} {' '.join(reply.text.split())[:200]}"
        if reply.status_code in PASSING:
            raise _Failed(reason, again=True, wait=_retry_after(reply))
        if reply.status_code in REFUSED:
            raise _Failed(f"the server refused it: {reason}", again=False)
        raise ServerError(
            f"{self.url}{path} answers {reason}: expected a server with OpenAI's protocol that serves the model "
            f"{self.model!r}; check the address (up to /v1), the served name and the key in OPENAI_API_KEY"
        )


class _Desk:
    """Takes what comes back, and ends the run where nothing does."""

    def __init__(self, done: Done, report: Report, takes_any: Callable[[], Awaitable[bool]]) -> None:
        self.done, self.report, self.takes_any = done, report, takes_any
        # until it has worked, a refusal may be of the settings, and is not written down
        self.worked, self.refused = False, list[tuple[Asked, str]]()
        self.fruitless, self.one_by_one = 0, asyncio.Lock()

    def answered(self, one: Asked, answer: Answer) -> None:
        self.worked, self.fruitless = True, 0
        self.done([one], [answer])
        self._write_down()

    async def failed(self, one: Asked, error: _Failed) -> None:
        async with self.one_by_one:
            if error.again:
                self.report.skip(f"{LATER}{error}", one.key)
            else:
                self.refused.append((one, str(error)))
            self.fruitless += error.again or not self.worked  # one that works may refuse any number
            if self.fruitless >= PATIENCE and (error.again or not await self._works()):
                told = f"{self.fruitless} prompts in a row came to nothing, the last one: {error}"
                raise ServerError(f"{told}; run it again later")
            self._write_down()

    async def close(self) -> None:
        """Writes down what was refused by a server that answers others."""
        if self.refused and not await self._works():
            raise ServerError(f"the server refused every prompt, the last one: {self.refused[-1][1]}")
        self._write_down()

    async def _works(self) -> bool:
        """Whether it is prompts that are refused, and not the settings."""
        if not self.worked and await self.takes_any():
            self.worked, self.fruitless = True, 0
        return self.worked

    def _write_down(self) -> None:
        if self.worked:
            for one, reason in self.refused:
                self.done([one], [Answer(one.prompt.messages, False, 0, reason)])
            self.refused = []


def _opened(reply: httpx.Response) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        told = reply.json()
        choice, usage = told["choices"][0], told.get("usage") or {}
        return dict(choice), dict(usage)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _Failed(f"the reply is not a completion: {reply.text[:100]!r}", again=True) from error


def _received(message: Any) -> dict[str, Any]:
    """The message of a reply as rows hold it."""
    try:
        return message_of("assistant", {**message, "content": message.get("content") or ""})
    except (Refused, TypeError, AttributeError) as error:
        raise _Failed(f"the reply's message is no use: {error}", again=False) from error


def _sent(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as the protocol wants it: a call's arguments as JSON text."""
    return {key: value for key, value in spelled(message).items() if key != "reasoning_content"}


def _retry_after(reply: httpx.Response) -> float:
    try:
        return min(LONGEST_WAIT, max(0.0, float(reply.headers.get("retry-after", "0"))))
    except ValueError:  # a date
        return 0.0
