"""What operators write."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.discovery.collection import CollectionSource
from router.discovery.kube import Cluster
from router.discovery.names import NameSource
from router.discovery.parse import check, parse

NAMES = [
    "dns://engines:8000",
    "dns://engines.serving.svc.cluster.local.:8000?scheme=https&interval=0.5&server=127.0.0.1:5353",
    "dns://engines:8000/?server=[::1]:53",
    "srv://_http._tcp.engines.serving.svc.cluster.local",
    "srv://_http._tcp.engines?interval=2&scheme=https",
]
COLLECTIONS = [
    "pods://serving?labels=app=engine,role=prefill&port=8000",
    "pods:///?labels=app=engine&labels=role=prefill&port=http",
    "pods:///?labels=app%20in%20(a,b),!old,x!=y,example.com/part=engine&port=http&scheme=https",
    "endpointslices://serving/engines?port=http",
    "endpointslices:///engines?port=8000&scheme=https",
]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    (tmp_path / "token").write_text("token")
    (tmp_path / "namespace").write_text("serving")
    return Cluster(directory=tmp_path, server="http://127.0.0.1:1", allow_http=True)


def test_an_engine_is_its_normalized_url() -> None:
    assert parse("http://10.0.0.1:8000/v1") == check("http://10.0.0.1:8000/v1") == "http://10.0.0.1:8000"


@pytest.mark.parametrize("text", NAMES)
def test_a_name_is_a_source_of_that_name(text: str) -> None:
    source = parse(text)
    assert isinstance(source, NameSource)
    assert source.name == check(text) == text


@pytest.mark.parametrize("text", COLLECTIONS)
def test_a_collection_is_a_source_of_that_name(text: str, cluster: Cluster) -> None:
    source = parse(text, cluster)
    assert isinstance(source, CollectionSource)
    assert source.name == check(text) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "neither an engine's address"),
        ("engines:8000", "neither an engine's address"),
        ("role=prefill&port=8000", "%2C"),
        ("http://", "not an engine's address"),
        ("redis://engines:8000", "not an engine's address"),
        ("dns://engines", "names no port; give it as dns://NAME:PORT"),
        ("dns://engines:0", "names no port"),
        ("dns://engines:99999", "Port out of range"),
        ("dns://engines:http", "Port could not be cast"),
        ("dns://:8000", "names no host"),
        ("dns://a..b:8000", "names no host"),
        ("dns://" + ".".join(["a" * 60] * 5) + ":8000", "names no host"),
        ("dns://engines:8000/v1", "names no host, got 'engines/v1'"),
        ("dns://10.0.0.1:8000", "10.0.0.1 is an address"),
        ("dns://[::1]:8000", "::1 is an address"),
        ("dns://[::1:8000", "Invalid IPv6 URL"),
        ("dns://user:secret@engines:8000", "no place for a user"),
        ("dns://engines:8000#x", "no place for a user or a fragment"),
        ("dns://engines:8000?intreval=5", "knows no option 'intreval', only scheme, interval, server"),
        ("dns://engines:8000?interval=5&interval=6", "has interval= twice"),
        ("dns://engines:8000?interval=0", "interval= is a number of seconds"),
        ("dns://engines:8000?interval=nan", "interval= is a number of seconds"),
        ("dns://engines:8000?interval=3601", "at most 3600"),
        ("dns://engines:8000?scheme=ftp", "scheme= is http or https, got 'ftp'"),
        ("dns://engines:8000?server=dns.test", "server= is the IP address"),
        ("dns://engines:8000?server=1.1.1.1:0", "server= is the IP address"),
        ("dns://engines:8000?interval", "bad query field"),
        ("dns://eng ines:8000", "no spaces"),
        ("dns://" + "a" * 2048, "at most 2048 characters"),
        ("srv://_http._tcp.engines:8000", "has no port"),
        ("pods://serving?labels=app=x", "needs port="),
        ("pods://serving?port=8000", "needs labels="),
        ("pods://serving?labels=&port=8000", "needs labels="),
        ("pods://serving?labels=app%3D%3Dx,,y&port=8000", "needs labels="),
        ("pods://serving?labels=a b&port=8000", "no spaces"),
        ("pods://serving?labels=app=x&port=0", "port= is a number or the name"),
        ("pods://serving?labels=app=x&port=65536", "port= is a number or the name"),
        ("pods://serving?labels=app=x&port=-", "port= is a number or the name"),
        ("pods://serving/engines?labels=app=x&port=http", "nothing after the namespace"),
        ("pods://Serving?labels=app=x&port=http", "names no namespace, got 'Serving'"),
        ("pods://serving:80?labels=app=x&port=http", "names no namespace"),
        ("pods://serving?labels=app=x&port=http&service=x", "knows no option 'service', only port, scheme, labels"),
        ("endpointslices://serving?port=http", "names no service, got ''"),
        ("endpointslices://serving/a/b?port=http", "names no service, got 'a/b'"),
        ("endpointslices://serving/engines", "needs port="),
        ("endpointslices://serving/engines?port=http&labels=a=b", "knows no option 'labels'"),
    ],
)
def test_a_mistake_is_said_as_what_to_do(text: str, says: str, cluster: Cluster) -> None:
    for read in (check, lambda text: parse(text, cluster)):
        with pytest.raises(ValueError) as error:
            read(text)
        assert says in str(error.value)


def test_kubernetes_outside_of_a_cluster_is_a_mistake_of_parse_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    check(COLLECTIONS[0])
    parse(NAMES[0])
    with pytest.raises(ValueError, match="KUBERNETES_SERVICE_HOST is not set"):
        parse(COLLECTIONS[0])


@pytest.mark.parametrize(
    ("host", "url"), [("10.0.0.1", "https://10.0.0.1:6443"), ("fd00::1", "https://[fd00::1]:6443")]
)
def test_the_server_is_that_of_the_environment(host: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    assert Cluster().server == url


def test_http_to_the_server_is_refused_unless_allowed(cluster: Cluster) -> None:
    with pytest.raises(ValueError, match="over https only"):
        parse(COLLECTIONS[0], Cluster(directory=cluster.directory, server=cluster.server))


@pytest.mark.parametrize("missing", ["token", "namespace"])
def test_a_missing_file_of_the_service_account_is_said_at_start(cluster: Cluster, missing: str) -> None:
    (cluster.directory / missing).unlink()
    with pytest.raises(ValueError, match=f"{missing}.*No such file|No such file.*{missing}"):
        parse(COLLECTIONS[1], cluster)


@pytest.mark.parametrize("text", ["", "two\nlines"])
def test_a_token_that_is_none_is_said_at_start(cluster: Cluster, text: str) -> None:
    (cluster.directory / "token").write_text(text)
    with pytest.raises(ValueError, match="token: not a token"):
        parse(COLLECTIONS[0], cluster)


def test_an_authority_that_is_none_is_said_at_start(cluster: Cluster) -> None:
    (cluster.directory / "ca.crt").write_text("nothing")
    with pytest.raises(ValueError, match=r"ca\.crt: not a certificate"):
        parse(COLLECTIONS[0], Cluster(directory=cluster.directory, server="https://127.0.0.1:1"))
