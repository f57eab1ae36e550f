"""Keep secrets out of whatever is saved or uploaded: the run's config.yaml, checkpoints, W&B."""

import re
from typing import Any

REDACTED = "<redacted>"

# A key is secret when one of these is a whole run of its words: `hf_token` and `wandbApiKey` are, `total_tokens`,
# `eos_token` and `author` are not.
_SECRET_KEY = re.compile(
    r"(?:^|_)(?:"
    r"api_?key|access_?key(?:_id)?|secret_?key|private_?key|ssh_?key|encryption_?key"
    r"|secrets?|passwords?|passwd|pwd|passphrase|credentials?|auth|authorization|bearer|netrc"
    r"|(?:auth|access|refresh|session|bearer|api|id|hf|hub|huggingface|wandb|github|gh|gitlab|git|security)_?token"
    r")(?:_|$)"
)
# Where 40 hex digits are a commit, not a W&B key.
_COMMIT_KEY = re.compile(r"(?:^|_)(?:commit|revision|rev|sha|sha1|git|hash)(?:_|$)")

_USERINFO = re.compile(r"(?<=://)[^\s/@:]*:[^\s/@]+(?=@)")
_QUERY_SECRET = re.compile(r"(?i)(?<=[?&])((?:[\w-]*(?:token|signature|password|secret|key)|sig)=)[^\s&#]+")
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"hf_[A-Za-z0-9]{16,}"
    r"|sk-(?:[A-Za-z0-9]{16,}|(?=[\w-]*\d)[\w-]{20,})"
    r"|gh[opusr]_[A-Za-z0-9]{16,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|wandb_v\d_\w{16,}|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{30,}|xox[abeprs]-[\w-]{10,}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+"
    r")"
)
_WANDB_KEY = re.compile(r"(?<![0-9A-Za-z])[0-9a-f]{40}(?![0-9A-Za-z])")


def redact(config: dict) -> dict:
    """A copy of `config` in which every secret, known by its key or by its look, reads `<redacted>`.

    Under a secret key the whole value goes, unless it is None, a bool or empty. In any other text only the secret
    part goes: `https://user:pw@host/x` becomes `https://<redacted>@host/x`.
    """
    return {key: _redact_value(key, value) for key, value in config.items()}


def _redact_value(key: Any, value: Any) -> Any:
    # one spelling for hfToken, hf-token and HF_TOKEN
    words = re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(key)).lower())
    if value is None or isinstance(value, bool) or value in ("", [], {}):
        return value
    if _SECRET_KEY.search(words) or (words == "token" and isinstance(value, str)):
        return REDACTED
    if isinstance(value, dict):
        return redact(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_redact_value(key, item) for item in value)
    if isinstance(value, str):
        return _redact_text(value, keep_commits=bool(_COMMIT_KEY.search(words)))
    return value


def _redact_text(text: str, *, keep_commits: bool) -> str:
    for pattern in (_PEM, _USERINFO, _TOKEN):
        text = pattern.sub(REDACTED, text)
    text = _QUERY_SECRET.sub(rf"\1{REDACTED}", text)
    return text if keep_commits else _WANDB_KEY.sub(REDACTED, text)
