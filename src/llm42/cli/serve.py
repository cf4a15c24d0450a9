"""`llm42 serve`: the OpenAI API for one model, until it is told to stop."""

from __future__ import annotations

import ipaddress
import json
import logging
import signal
import ssl
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from llm42.cli import options
from llm42.cli.errors import reported
from llm42.cli.loading import load

if TYPE_CHECKING:
    from llm42 import AsyncLLM
    from llm42.server.settings import ServerSettings

logger = logging.getLogger(__name__)

_HTTP = "HTTP"
_API = "API"
_LIMITS = "Limits"
_LOG_LEVELS = ("debug", "info", "warning", "error")
_LOG_FORMATS = ("text", "json")


def serve(
    model: options.Model,
    *,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is every one of this machine.", rich_help_panel=_HTTP)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535, rich_help_panel=_HTTP)
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key that requests must carry as a bearer token; may be repeated. Other users of this machine can "
            "see it: a file is better.",
            show_default="everybody is let in",
            rich_help_panel=_HTTP,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with such keys, one a line.", show_default=False, rich_help_panel=_HTTP)
    ] = None,
    ssl_certfile: Annotated[
        Path | None, typer.Option(help="TLS certificate (PEM).", show_default="no TLS", rich_help_panel=_HTTP)
    ] = None,
    ssl_keyfile: Annotated[
        Path | None, typer.Option(help="Its private key (PEM).", show_default=False, rich_help_panel=_HTTP)
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin whose pages may call the API, or `*`; may be repeated.",
            show_default="none",
            rich_help_panel=_HTTP,
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Name of the model in the API; may be repeated.", show_default="MODEL", rich_help_panel=_API),
    ] = None,
    deterministic_default: Annotated[
        bool,
        typer.Option(
            "--deterministic-default/--no-deterministic-default",
            help="Whether requests that do not say are deterministic.",
            rich_help_panel=_API,
        ),
    ] = False,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            help="How the model writes tool calls: `hermes`, `llama3_json`, `mistral`, ...",
            show_default="by its chat template",
            rich_help_panel=_API,
        ),
    ] = None,
    max_queue_len: Annotated[
        int | None,
        typer.Option(
            help="Requests that may wait; one more is answered 429.", show_default="1024", rich_help_panel=_LIMITS
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(help="Requests that run together.", show_default="64", rich_help_panel=_LIMITS),
    ] = None,
    max_body_size: Annotated[
        int,
        typer.Option(
            help="Largest request body, such as 32M.", metavar="SIZE", parser=options.size, rich_help_panel=_LIMITS
        ),
    ] = 32 << 20,
    request_timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds that a request may take, waiting included.", show_default="no limit", rich_help_panel=_LIMITS
        ),
    ] = None,
    drain_timeout: Annotated[
        int,
        typer.Option(
            help="Seconds that running requests have to finish when the server is stopped.",
            min=0,
            rich_help_panel=_LIMITS,
        ),
    ] = 30,
    log_level: Annotated[
        str, typer.Option(metavar="|".join(_LOG_LEVELS), help="What is logged to stderr.", rich_help_panel=_HTTP)
    ] = "info",
    log_format: Annotated[
        str,
        typer.Option(metavar="|".join(_LOG_FORMATS), help="Lines for people or for programs.", rich_help_panel=_HTTP),
    ] = "text",
    mode: options.Mode = None,
    kernels: options.Kernels = None,
    dtype: options.DType = None,
    window_size: options.WindowSize = None,
    verify_batch_size: options.VerifyBatchSize = None,
    num_threads: options.NumThreads = None,
    max_model_len: options.MaxModelLen = None,
    kv_cache_bytes: options.KVCacheBytes = None,
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Keep the KV of prompts for requests that begin alike.",
            rich_help_panel="Engine",
        ),
    ] = True,
    debug: options.Debug = False,
) -> None:
    """Serve a model over the OpenAI API, with a page to try it at /.

    Requests with `"deterministic": true` return the same bits in any batch. Stop it with Ctrl-C or SIGTERM: what runs
    is finished first.
    """
    with reported(debug=debug):
        _check_choice("log_level", log_level, _LOG_LEVELS)
        _check_choice("log_format", log_format, _LOG_FORMATS)
        _check_tls(ssl_certfile, ssl_keyfile)
        from llm42.server.settings import ServerSettings, read_api_keys
        from llm42.server.tools import PARSERS

        if tool_call_parser is not None:
            _check_choice("tool_call_parser", tool_call_parser, tuple(PARSERS))
        keys = (*(api_key or ()), *(read_api_keys(api_key_file) if api_key_file is not None else ()))
        settings = ServerSettings(
            model_names=tuple(served_model_name or (model,)),
            api_keys=keys,
            deterministic_default=deterministic_default,
            cors_origins=tuple(cors_origin or ()),
            max_body_size=max_body_size,
            request_timeout_s=request_timeout,
            tool_call_parser=tool_call_parser,
        )
        fields = options.given(
            mode=mode,
            kernels=kernels,
            dtype=dtype,
            window_size=window_size,
            verify_batch_size=verify_batch_size,
            num_threads=num_threads,
            max_model_len=max_model_len,
            kv_cache_bytes=kv_cache_bytes,
            max_queue_len=max_queue_len,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=enable_prefix_caching,
        )
        _set_up_logging(log_level, log_format)
        # Until the server runs, SIGTERM is Ctrl-C; the first process of a container would not even hear of it.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        from llm42 import AsyncLLM

        listener = _listen(host, port)  # before the model is loaded: a port that is taken should not cost a minute
        llm = load(AsyncLLM, model, fields)
        tls = {"ssl_certfile": ssl_certfile, "ssl_keyfile": ssl_keyfile} if ssl_certfile else {}
        try:
            from llm42.server.runner import run

            run(llm, settings, listener, lambda: _banner(llm, settings, listener, is_tls=bool(tls)), drain_timeout, tls)
        finally:
            llm.close()


def _listen(host: str, port: int) -> Any:
    """A socket that is bound."""
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ValueError(f"port {port} of host {host} cannot be used ({error}); choose another with --port") from error
    return listener


def _banner(llm: AsyncLLM, settings: ServerSettings, listener: Any, *, is_tls: bool) -> None:
    """What runs, where, and a line to try it."""
    host, port = listener.getsockname()[:2]
    # Nobody can connect to "every address": show one of them.
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    shown = f"[{address}]" if address.version == 6 else str(address)
    url = f"{'https' if is_tls else 'http'}://{shown}:{port}"
    name = settings.model_names[0]
    body = {"model": name, "messages": [{"role": "user", "content": "Hello!"}], "deterministic": True}
    key = ' -H "Authorization: Bearer $LLM42_API_KEY"' if settings.api_keys else ""
    lines = [
        (logging.INFO, f"serving {name} at {url}/v1  ·  page: {url}/  ·  metrics: {url}/metrics"),
        (
            logging.INFO,
            f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'",
        ),
    ]
    if llm.refusal:
        lines.append((logging.WARNING, f"deterministic requests are refused: {llm.refusal}"))
    if not ipaddress.ip_address(host).is_loopback and not settings.api_keys:
        lines.append((logging.WARNING, "everybody who reaches this address may use it; set --api-key-file"))
    if any(isinstance(handler.formatter, _JSONFormatter) for handler in logging.getLogger().handlers):
        for level, line in lines:  # whoever reads objects should not find anything else
            logger.log(level, line)
        return
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    for level, line in lines:
        is_warning = level == logging.WARNING
        console.print(f"warning: {line}" if is_warning else line, style="yellow" if is_warning else None, markup=False)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def _check_tls(certfile: Path | None, keyfile: Path | None) -> None:
    for name, path in (("ssl_certfile", certfile), ("ssl_keyfile", keyfile)):
        if path is not None and not path.is_file():
            raise ValueError(f"{name} {path} is not a file")
    if keyfile is not None and certfile is None:
        raise ValueError("ssl_keyfile needs ssl_certfile; give both")
    if certfile is not None:
        try:
            # An empty password: nobody is asked for one, and a key that needs one is refused.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password="")
        except ssl.SSLError as error:
            raise ValueError(
                f"ssl_certfile {certfile} and ssl_keyfile {keyfile} are no certificate with its unencrypted key in PEM "
                f"({error})"
            ) from error


class _JSONFormatter(logging.Formatter):
    """One JSON object a line, with everything that was logged as `extra`."""

    _STANDARD = frozenset(logging.LogRecord("", 0, "", 0, "", None, None).__dict__) | {"message", "asctime", "taskName"}

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: value for name, value in record.__dict__.items() if name not in self._STANDARD}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _set_up_logging(level: str, style: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(_JSONFormatter() if style == "json" else text)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    for name in ("llm42", "uvicorn"):
        logging.getLogger(name).setLevel(level.upper())
