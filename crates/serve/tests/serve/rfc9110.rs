//! Range requests and preconditions of RFC 9110. Each row of the table names its section.

use crate::common::{Service, large_content};

/// The expected response of a row.
pub struct Expected {
    status: u16,
    /// The value of `Content-Range`; `None` if the field must be absent.
    content_range: Option<&'static str>,
    /// Not compared if the status is 412.
    body: &'static str,
}

/// The complete representation.
const fn complete() -> Expected {
    Expected { status: 200, content_range: None, body: "0123456789" }
}

/// One range of the representation.
const fn partial(content_range: &'static str, body: &'static str) -> Expected {
    Expected { status: 206, content_range: Some(content_range), body }
}

/// A range that contains no byte of the representation.
const fn unsatisfiable() -> Expected {
    Expected {
        status: 416,
        content_range: Some("bytes */10"),
        body: "416 Range Not Satisfiable: there are 10 bytes\n",
    }
}

/// A response without a body. A 412 may have one, which is not compared.
const fn no_body(status: u16) -> Expected {
    Expected { status, content_range: None, body: "" }
}

/// The responses that RFC 9110 requires for a file of ten bytes. In the fields, `{etag}` and
/// `{modified}` stand for the file's validators, `{before}` and `{after}` for one day before and
/// after `{modified}`.
pub const TABLE: &[(&str, &str, &str, Expected)] = &[
    // Section, method, fields, response.
    ("9.3.1 GET", "GET", "", complete()),
    ("9.3.2 HEAD: the same fields, no body", "HEAD", "", no_body(200)),
    ("14.1.2 first and last", "GET", "Range: bytes=2-4\r\n", partial("bytes 2-4/10", "234")),
    ("14.1.2 one byte", "GET", "Range: bytes=0-0\r\n", partial("bytes 0-0/10", "0")),
    ("14.1.2 open end", "GET", "Range: bytes=7-\r\n", partial("bytes 7-9/10", "789")),
    ("14.1.2 last beyond the end", "GET", "Range: bytes=7-99\r\n", partial("bytes 7-9/10", "789")),
    ("14.1.2 suffix", "GET", "Range: bytes=-3\r\n", partial("bytes 7-9/10", "789")),
    (
        "14.1.2 suffix longer than the file",
        "GET",
        "Range: bytes=-99\r\n",
        partial("bytes 0-9/10", "0123456789"),
    ),
    ("14.1.2 units in any case", "GET", "Range: BYTES=2-4\r\n", partial("bytes 2-4/10", "234")),
    ("14.2 another unit is ignored", "GET", "Range: rows=2-4\r\n", complete()),
    ("14.2 malformed may be ignored", "GET", "Range: bytes=4-2\r\n", complete()),
    ("14.2 only GET has ranges", "HEAD", "Range: bytes=2-4\r\n", no_body(200)),
    ("15.5.17 none satisfiable", "GET", "Range: bytes=10-\r\n", unsatisfiable()),
    ("15.5.17 empty suffix", "GET", "Range: bytes=-0\r\n", unsatisfiable()),
    (
        "14.2 one of two satisfiable",
        "GET",
        "Range: bytes=20-,2-4\r\n",
        partial("bytes 2-4/10", "234"),
    ),
    ("13.1.1 If-Match holds", "GET", "If-Match: {etag}\r\n", complete()),
    ("13.1.1 If-Match of any", "GET", "If-Match: *\r\n", complete()),
    ("13.1.1 If-Match in a list", "GET", "If-Match: \"a\", {etag}\r\n", complete()),
    ("13.1.1 If-Match of another tag", "GET", "If-Match: \"a\"\r\n", no_body(412)),
    ("13.1.1 If-Match compares strongly", "GET", "If-Match: W/{etag}\r\n", no_body(412)),
    ("13.1.2 If-None-Match holds", "GET", "If-None-Match: \"a\"\r\n", complete()),
    ("13.1.2 If-None-Match of this tag", "GET", "If-None-Match: {etag}\r\n", no_body(304)),
    ("13.1.2 If-None-Match compares weakly", "GET", "If-None-Match: W/{etag}\r\n", no_body(304)),
    ("13.1.2 If-None-Match of any", "HEAD", "If-None-Match: *\r\n", no_body(304)),
    (
        "13.1.2 If-None-Match in two lines",
        "GET",
        "If-None-Match: \"a\"\r\nIf-None-Match: {etag}\r\n",
        no_body(304),
    ),
    ("13.1.3 If-Modified-Since equal", "GET", "If-Modified-Since: {modified}\r\n", no_body(304)),
    ("13.1.3 If-Modified-Since later", "GET", "If-Modified-Since: {after}\r\n", no_body(304)),
    ("13.1.3 If-Modified-Since before", "GET", "If-Modified-Since: {before}\r\n", complete()),
    ("13.1.3 an invalid date is ignored", "GET", "If-Modified-Since: tomorrow\r\n", complete()),
    (
        "13.1.3 If-None-Match takes precedence",
        "GET",
        "If-None-Match: \"a\"\r\nIf-Modified-Since: {after}\r\n",
        complete(),
    ),
    ("13.1.4 If-Unmodified-Since holds", "GET", "If-Unmodified-Since: {modified}\r\n", complete()),
    ("13.1.4 If-Unmodified-Since fails", "GET", "If-Unmodified-Since: {before}\r\n", no_body(412)),
    (
        "13.1.4 If-Match takes precedence",
        "GET",
        "If-Match: {etag}\r\nIf-Unmodified-Since: {before}\r\n",
        complete(),
    ),
    ("13.2.2 412 before 304", "GET", "If-Match: \"a\"\r\nIf-None-Match: {etag}\r\n", no_body(412)),
    (
        "13.2.2 304 before the range",
        "GET",
        "If-None-Match: {etag}\r\nRange: bytes=2-4\r\n",
        no_body(304),
    ),
    ("13.2.2 412 before the range", "GET", "If-Match: \"a\"\r\nRange: bytes=2-4\r\n", no_body(412)),
    (
        "13.2.2 preconditions before 416",
        "GET",
        "If-None-Match: {etag}\r\nRange: bytes=10-\r\n",
        no_body(304),
    ),
    (
        "13.1.5 If-Range with this tag",
        "GET",
        "If-Range: {etag}\r\nRange: bytes=2-4\r\n",
        partial("bytes 2-4/10", "234"),
    ),
    (
        "13.1.5 If-Range with another tag",
        "GET",
        "If-Range: \"a\"\r\nRange: bytes=2-4\r\n",
        complete(),
    ),
    (
        "13.1.5 If-Range compares strongly",
        "GET",
        "If-Range: W/{etag}\r\nRange: bytes=2-4\r\n",
        complete(),
    ),
    (
        "13.1.5 If-Range with this date",
        "GET",
        "If-Range: {modified}\r\nRange: bytes=2-4\r\n",
        partial("bytes 2-4/10", "234"),
    ),
    (
        "13.1.5 If-Range with a later date",
        "GET",
        "If-Range: {after}\r\nRange: bytes=2-4\r\n",
        complete(),
    ),
    ("13.1.5 If-Range without Range", "GET", "If-Range: {etag}\r\n", complete()),
    (
        "13.1.5 If-Range with another tag: no 416",
        "GET",
        "If-Range: \"a\"\r\nRange: bytes=10-\r\n",
        complete(),
    ),
];

/// Replaces the placeholders in the fields of a row, for a file with this entity tag.
pub fn expand_fields(fields: &str, etag: &str) -> String {
    fields
        .replace("{etag}", etag)
        .replace("{modified}", "Sun, 06 Nov 1994 08:49:37 GMT")
        .replace("{before}", "Sat, 05 Nov 1994 08:49:37 GMT")
        .replace("{after}", "Mon, 07 Nov 1994 08:49:37 GMT")
}

#[test]
fn each_row_of_the_table_gets_its_response() {
    let service = Service::start(
        |root| {
            let file = std::fs::File::options().write(true).open(root.join("ten.txt")).unwrap();
            file.set_modified(std::time::UNIX_EPOCH + std::time::Duration::from_secs(784_111_777))
                .unwrap();
        },
        |_| {},
    )
    .wait_for_tags();
    let unconditional = service.get("/ten.txt");
    let etag = unconditional.field("etag").unwrap().to_owned();
    assert_eq!(unconditional.field("last-modified"), Some("Sun, 06 Nov 1994 08:49:37 GMT"));
    for (section, method, fields, expected) in TABLE {
        let fields = expand_fields(fields, &etag);
        let response = service.request(method, "/ten.txt", &fields);
        let row = format!("{section}: {fields:?} got {response:?}");
        assert_eq!(response.status, expected.status, "{row}");
        assert_eq!(response.field("content-range"), expected.content_range, "{row}");
        if expected.status != 412 {
            assert_eq!(response.text(), expected.body, "{row}");
        }
        // Section 15.4.5: a 304 has the validators that a 200 would have had. Here every response
        // below 400 has them.
        if response.status < 400 {
            assert_eq!(response.field("etag"), Some(&*etag), "{row}");
            assert!(response.field("date").is_some(), "{row}");
        }
        // Section 8.6: a 304 has neither a body nor a Content-Length. A response to HEAD has the
        // Content-Length of the 200 to GET.
        match (response.status, *method) {
            (304, _) => assert_eq!(response.field("content-length"), None, "{row}"),
            (200, _) => assert_eq!(response.field("content-length"), Some("10"), "{row}"),
            _ => {}
        }
    }
}

#[test]
fn several_ranges_are_sent_as_one_multipart_body() {
    let service = Service::start_default();
    let large = large_content();
    for (target, ranges, expected) in [
        ("/ten.txt", "0-1,5-,-1", vec![(0, 1), (5, 9), (9, 9)]),
        (
            "/large.bin",
            "0-0,1000000-2999999,-5",
            vec![(0, 0), (1_000_000, 2_999_999), (large.len() - 5, large.len() - 1)],
        ),
    ] {
        let content = if target == "/ten.txt" { b"0123456789".to_vec() } else { large.clone() };
        let response = service.request("GET", target, &format!("Range: bytes={ranges}\r\n"));
        assert_eq!(response.status, 206);
        assert_eq!(response.field("content-range"), None, "section 15.3.7.2");
        let boundary = response
            .field("content-type")
            .unwrap()
            .strip_prefix("multipart/byteranges; boundary=")
            .unwrap();
        let delimiter = format!("\r\n--{boundary}");
        let mut start = 0;
        for (first, last) in expected {
            let text = String::from_utf8_lossy(
                &response.body[start..response.body.len().min(start + 300)],
            )
            .into_owned();
            assert!(text.starts_with(&format!("{delimiter}\r\n")), "{text}");
            let head_bytes = text.find("\r\n\r\n").unwrap() + 4;
            assert!(
                text[..head_bytes].contains(&format!(
                    "\r\nContent-Range: bytes {first}-{last}/{}\r\n",
                    content.len()
                )),
                "{text}"
            );
            assert!(text[..head_bytes].contains("\r\nContent-Type: "), "{text}");
            start += head_bytes;
            assert!(response.body[start..].starts_with(&content[first..=last]), "{first}-{last}");
            start += last - first + 1;
        }
        assert_eq!(response.body[start..], *format!("{delimiter}--\r\n").as_bytes());
    }
    // Section 14.2: many ranges, or ranges that largely overlap, may be an attack. The response is
    // the complete file instead.
    assert_eq!(service.request("GET", "/ten.txt", "Range: bytes=0-8,1-9\r\n").status, 200);
    let many = format!("Range: bytes=0-0{}\r\n", ",2-2".repeat(200));
    assert_eq!(service.request("GET", "/ten.txt", &many).status, 200);
}

#[test]
fn an_empty_file_is_never_sent_as_partial_content() {
    let service = Service::start_default();
    let empty = service.get("/empty");
    assert_eq!((empty.status, empty.field("content-length")), (200, Some("0")));
    assert_eq!(service.request("GET", "/empty", "Range: bytes=0-\r\n").status, 416);
    assert_eq!(service.request("GET", "/empty", "Range: bytes=-1\r\n").status, 200);
}

#[test]
fn methods_are_answered_as_section_9_requires() {
    let service = Service::start_default();
    let options = service.request("OPTIONS", "/ten.txt", "");
    assert_eq!((options.status, options.field("allow")), (204, Some("GET, HEAD, OPTIONS")));
    assert_eq!(service.request("OPTIONS", "*", "").status, 204, "section 9.3.7");
    for method in ["POST", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT"] {
        let refused = service.request(method, "/ten.txt", "");
        assert_eq!(
            (refused.status, refused.field("allow")),
            (405, Some("GET, HEAD, OPTIONS")),
            "section 15.5.6: {method}"
        );
    }
    assert_eq!(service.request("BREW", "/ten.txt", "").status, 501, "section 15.6.2");
    assert_eq!(
        service.request("get", "/ten.txt", "").status,
        501,
        "section 9.1: methods are case-sensitive"
    );
    assert_eq!(service.get("*").status, 400);
    assert_eq!(
        service.get("http://other.example/ten.txt").text(),
        "0123456789",
        "RFC 9112 section 3.2.2"
    );
}
