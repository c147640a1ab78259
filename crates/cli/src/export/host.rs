//! The host names of this exporter. A web page can make its own name point to 127.0.0.1; its requests then carry that
//! name as their host.

use std::{fs, net::Ipv6Addr};

use hyper::{Request, header::HOST};

/// The names that the exporter answers to.
#[derive(Debug)]
pub(super) struct Names(Vec<String>);

impl Names {
    /// Returns `localhost`, the names of this machine, and the names in `given`.
    pub(super) fn with(given: impl IntoIterator<Item = String>) -> Self {
        let machine = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let resolver = fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
        let full = domains(&resolver).map(|domain| format!("{machine}.{domain}")).collect::<Vec<_>>();
        let all = ["localhost".to_owned(), machine].into_iter().chain(full).chain(given);
        Self(all.map(|name| normal(&name)).filter(|name| !name.is_empty()).collect())
    }

    /// Returns the host named in the request, if it is not a name of this exporter. Browsers always send one.
    pub(super) fn foreign_host<B>(&self, request: &Request<B>) -> Option<String> {
        let in_address = request.uri().authority().map(|authority| authority.as_str().to_owned());
        let headers = request.headers().get_all(HOST).iter();
        let mut all = headers.map(|host| String::from_utf8_lossy(host.as_bytes()).into_owned()).chain(in_address);
        all.find(|host| !self.has(host))
    }

    fn has(&self, host: &str) -> bool {
        let host = without_port(host);
        host.is_empty() || is_address(host) || self.0.contains(&normal(host))
    }
}

/// Returns the domains that the resolver of this machine appends to names.
fn domains(resolver: &str) -> impl Iterator<Item = &str> {
    resolver.lines().flat_map(|line| {
        let mut words = line.split_whitespace();
        let is_list = matches!(words.next(), Some("search" | "domain"));
        words.filter(move |_| is_list)
    })
}

/// Returns a host without its port.
pub(super) fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

/// Removes the dot that DNS allows at the end of full names, and ignores case as DNS does.
fn normal(name: &str) -> String {
    name.trim_end_matches('.').to_ascii_lowercase()
}

/// Returns whether this is an address, which no DNS server can redirect. As in browsers, a host of numbers is an IPv4
/// address, such as `127.1`.
fn is_address(host: &str) -> bool {
    if let Some(inside) = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        return inside.split('%').next().is_some_and(|address| address.parse::<Ipv6Addr>().is_ok());
    }
    let is_number = |part: &str| match part.strip_prefix("0x").or_else(|| part.strip_prefix("0X")) {
        Some(digits) => digits.bytes().all(|byte| byte.is_ascii_hexdigit()),
        None => !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()),
    };
    host.trim_end_matches('.').split('.').all(is_number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_own_names_and_addresses_are_answered() {
        let names = Names::with(["metrics.example.org".to_owned(), "Node-7".to_owned()]);
        let machine = rustix::system::uname().nodename().to_string_lossy().into_owned();
        for host in [
            "",
            "localhost",
            "LOCALHOST:9837",
            "localhost.",
            "127.0.0.1:9837",
            "10.1.2.3",
            "127.1",
            "0x7f000001:80",
            "2130706433",
            "[::1]:9837",
            "[fe80::1%eth0]",
            "metrics.example.org:443",
            "node-7",
            &machine,
        ] {
            assert!(names.has(host), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:9837",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "127.0.0.1.nip.io:9837",
            "metrics.example.org.evil.example",
            "example.org",
            "[evil.example]",
            "localhost:9837@evil.example",
            "évil",
            ":evil",
            "0xevil",
            "evil.example:127.0.0.1",
            "evil.127.0.0.1",
        ] {
            assert!(!names.has(host), "{host}");
        }
    }

    #[test]
    fn each_named_host_counts() {
        let names = Names::with([]);
        let request = |address: &str, hosts: &[&str]| {
            let request = Request::builder().uri(address);
            hosts.iter().fold(request, |request, host| request.header(HOST, *host)).body(()).unwrap()
        };
        let foreign = |address, hosts: &[&str]| names.foreign_host(&request(address, hosts));
        assert_eq!(foreign("/metrics", &[]), None);
        assert_eq!(foreign("http://localhost:1/metrics", &["127.0.0.1:1"]), None);
        assert_eq!(foreign("/metrics", &["localhost", "evil.example"]).as_deref(), Some("evil.example"));
        assert_eq!(foreign("http://evil.example:1/metrics", &["localhost"]).as_deref(), Some("evil.example:1"));
    }

    #[test]
    fn the_resolver_has_domains() {
        let text = "# search a\nnameserver 10.0.0.1\nsearch b.example  c.example\noptions ndots:5\ndomain d\n";
        assert_eq!(domains(text).collect::<Vec<_>>(), ["b.example", "c.example", "d"]);
    }
}
