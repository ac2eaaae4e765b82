"""What goes wrong in a store, told by kind in one line with the cure, in time, and without any secret.

fsspec's drivers raise what their clouds' libraries do: of many kinds, some no OSError, with keys in their texts.
"""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

DRIVERS = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}


def redact(text: str) -> str:
    """`text` (a URI, or a message with some in it) without passwords, keys, tokens and the queries of URLs."""
    text = re.sub(r"(://)[^/@\s]*:(?!\d+/)(?:[^/\s]*@|[^@\s]*@)", r"\1", text)
    text = re.sub(r"(\bhttps?://)[^/@\s]+@", r"\1", text)
    text = re.sub(r"(://[^\s?]*)\?[^\s\"'<>)]*", r"\1", text)
    return _SECRET.sub(r"\1...", text)


_SECRET = re.compile(
    r"(?i)(\b[\w-]*(?:signature|credential|token|secret|passw(?:or)?d|key(?:_?id)?|sig)[\"']?\s*[=:]\s*[\"']?"
    r"|\b(?:bearer|basic|sharedkey)\s+|\b(?=(?:AKIA|ASIA)[0-9A-Z]{16}\b))[^\s&,;)\"']+"
)


def refuse_secrets(uri: str) -> None:
    """Raises ValueError for a password or a query in a bucket's URI: drivers take them for its name, and quote it."""
    scheme = uri.partition("://")[0]
    if scheme in DRIVERS and re.search(r"://[^/@]*:[^@]*@|\?", uri):
        raise ValueError(f"{redact(uri)}: a URI of {scheme}:// holds neither password nor query: {cure(scheme)}")


@contextmanager
def told(uri: str) -> Iterator[None]:
    """Turns whatever a driver raises into an OSError or a ValueError of one line: `uri`, what is wrong, the cure."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # drivers have their own kinds, and to name them is to import them
        raise _translated(error, redact(uri)) from None  # their chains quote keys and signed queries


def _translated(error: Exception, uri: str) -> OSError | ValueError:
    chain: list[Any] = [error]
    while link := chain[-1].__cause__ or (None if chain[-1].__suppress_context__ else chain[-1].__context__):
        chain.append(link)
    kinds = {kind.__name__ for link in chain for kind in type(link).__mro__}
    replies = [link.response for link in chain if isinstance(getattr(link, "response", None), dict)]  # botocore's
    said = {str(getattr(link, key, None)) for link in chain for key in ("status", "status_code", "code", "error_code")}
    said |= {str(reply.get("Error", {}).get("Code")) for reply in replies}
    said |= {str(reply.get("ResponseMetadata", {}).get("HTTPStatusCode")) for reply in replies}
    text = " ".join(redact(str(error)).partition("RequestId:")[0].split()) or type(error).__name__
    text = text if len(text) <= 300 else text[:300] + "..."
    scheme = uri.partition("://")[0]
    if kinds & _NO_CREDENTIALS:
        return PermissionError(f"{uri}: no credentials were found ({text}): {cure(scheme)}")
    if "NoSuchUpload" in said:
        return ConnectionError(f"{uri}: the server has forgotten the parts that it was sent ({text})")
    if said & {"401", "403"} or "PermissionError" in kinds or text.startswith("Forbidden"):
        return PermissionError(f"{uri}: no right, or a wrong key ({text}): get the right there, or {cure(scheme)}")
    if kinds & _TIMEOUTS:
        return TimeoutError(f"{uri}: no answer in time ({text}): see whether the server is up, and the way to it")
    if kinds & _CONNECTIONS or any(re.fullmatch(r"5\d\d|429|408", status) for status in said):
        return ConnectionError(
            f"{uri}: the server cannot serve this now ({text}): see whether it is up and can be reached"
        )
    # After those: a driver may look on, and fail, when one look found nothing. That is no proof of absence.
    if said & {"NoSuchBucket", "ContainerNotFound"}:
        return FileNotFoundError(f"{uri}: there is no such bucket: make it, or correct the name")
    if "404" in said or "FileNotFoundError" in kinds:
        return FileNotFoundError(f"{uri}: {text}" if "bucket:" in text else f"{uri} does not exist")
    if "ImportError" in kinds:
        driver = DRIVERS.get(scheme)
        return ValueError(f"{uri}: {text}" + f": python -m pip install {driver}" * bool(driver))
    if "NotImplementedError" in kinds:
        return ValueError(f"{uri}: this kind of store cannot do that ({text}): name another")
    if kinds & {"ValueError", "TypeError", "ParamValidationError"} or "InvalidBucketName" in said:
        return ValueError(f"{uri}: {text}" + f": {cure(scheme)}" * ("unable to connect" in text))  # adlfs
    return OSError(f"{uri}: {text}")


def cure(scheme: str) -> str:
    return _CURES.get(DRIVERS.get(scheme, ""), "see what its driver's documentation says of credentials")


# How to give a driver credentials.
_CURES = {
    "s3fs": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE (AWS_ENDPOINT_URL if not at Amazon)",
    "gcsfs": "set GOOGLE_APPLICATION_CREDENTIALS to a key file, or run `gcloud auth application-default login`",
    "adlfs": "set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
# Names of exceptions (of any in the chain, or a base) in botocore, aiohttp, requests, google.auth and azure.
_NO_CREDENTIALS = {
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound", "SSOError",
    "GoogleAuthError", "ClientAuthenticationError",
}  # fmt: skip
_TIMEOUTS = {"TimeoutError", "ConnectTimeoutError", "ReadTimeoutError", "Timeout"}
_CONNECTIONS = {
    "ConnectionError", "EndpointConnectionError", "ConnectionClosedError", "HTTPClientError", "ClientConnectionError",
    "ClientPayloadError", "ServiceRequestError", "ServiceResponseError", "IncompleteReadError", "gaierror",
    "JSONDecodeError",  # a gateway's page where the server's answer was to be
}  # fmt: skip


class LateError(TimeoutError):
    """What `within` waited for did not happen in time."""


def within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns or raises; done in a thread, which is left behind with LateError when it takes longer."""
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001  # raised below
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failures:
        raise failures[0]
    if not results:
        raise LateError(f"nothing came in {seconds} s")
    return results[0]
