"""Secrets go, everything else stays. The samples are made up; they only look like the real thing."""

import pytest

from msa_pretrain.training.sinks import redact

ALNUM = "aB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zA1b"
HEX40 = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    "key",
    [
        "api_key", "apikey", "API_KEY", "wandb_api_key", "wandbApiKey", "secret", "client_secret", "password",
        "db.password", "auth_token", "access_token", "hf_token", "hf-token", "hfToken", "private_key",
        "aws_secret_access_key", "token", "credentials", "passphrase",
    ],
)  # fmt: skip
def test_secret_keys(key):
    assert redact({key: "x"}) == {key: "<redacted>"}


@pytest.mark.parametrize(
    "key, value",
    [
        ("total_tokens", 40_000_000_000),
        ("warmup_tokens", 4096),
        ("lr_warmup_tokens", "40e9"),
        ("tokens_per_step", 12),
        ("tokenizer", "byte"),
        ("eos_token", "</s>"),
        ("token", 5),
        ("author", "someone"),
        ("authors", ["a", "b"]),
        ("secretary", "x"),
        ("keyboard", "x"),
        ("top_k", 16),
        ("api_key", None),
        ("api_key", ""),
        ("use_auth_token", True),
        ("project", "msa-pretrain"),
        ("name", "sk-learn-baseline-without-digits"),
        ("name", "task-2026-09-30-sparse-attention"),
        ("path", "data/hf_checkpoint_conversion_directory"),
        ("url", "https://example.org/a:b@c/d"),
        ("commit", HEX40),
        ("git_sha", HEX40),
        ("revision", HEX40),
        ("betas", (0.9, 0.95)),
    ],
)
def test_harmless_values_stay(key, value):
    assert redact({key: value}) == {key: value}


@pytest.mark.parametrize(
    "value",
    [
        "hf_" + ALNUM,
        "sk-" + ALNUM,
        "sk-proj-" + ALNUM + "_x-y",
        "ghp_" + ALNUM,
        "github_pat_" + ALNUM,
        "glpat-" + ALNUM[:20],
        "wandb_v1_" + ALNUM,
        "AKIA" + "ABCDEFGH01234567",
        HEX40,
        f"eyJ{ALNUM}.eyJ{ALNUM}.{ALNUM}",
        f"-----BEGIN RSA PRIVATE KEY-----\n{ALNUM}\n-----END RSA PRIVATE KEY-----",
    ],
    ids=lambda value: value[:6],
)
def test_values_that_look_like_secrets(value):
    assert redact({"note": value}) == {"note": "<redacted>"}
    assert redact({"note": f"use {value} here"}) == {"note": "use <redacted> here"}


@pytest.mark.parametrize(
    "url, clean",
    [
        ("https://user:pa55@host/x", "https://<redacted>@host/x"),
        ("s3://key:sec/ret@host", "s3://key:sec/ret@host"),  # a slash ends the host part: this is no userinfo
        ("https://:pa55@host:80/x?a=1", "https://<redacted>@host:80/x?a=1"),
        ("https://host/x?a=1&access_token=abc&b=2", "https://host/x?a=1&access_token=<redacted>&b=2"),
        ("https://host/x?X-Amz-Signature=abc", "https://host/x?X-Amz-Signature=<redacted>"),
    ],
)
def test_only_the_secret_part_of_a_url_goes(url, clean):
    assert redact({"url": url}) == {"url": clean}


def test_nested_values_and_the_input_is_left_alone():
    config = {
        "data": {"train": [{"path": "a", "hf_token": "x"}, "https://u:p@h/"], "pair": ("sk-" + ALNUM, 1)},
        "credentials": {"user": "me", "password": "x"},
        "model": {"hidden_size": 128, "norm_eps": 1e-6},
    }
    assert redact(config) == {
        "data": {
            "train": [{"path": "a", "hf_token": "<redacted>"}, "https://<redacted>@h/"],
            "pair": ("<redacted>", 1),
        },
        "credentials": "<redacted>",
        "model": {"hidden_size": 128, "norm_eps": 1e-6},
    }
    assert config["credentials"] == {"user": "me", "password": "x"}
