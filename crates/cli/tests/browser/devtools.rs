//! A client of Chromium's protocol `DevTools`, with the parts that these tests need. With `--remote-debugging-pipe`, Chromium
//! reads and writes messages of JSON, each with a 0 at its end, so the client needs no socket. The crates that drive browsers
//! depend on at least 60 other crates, and a dev-dependency cannot be optional.

use std::{
    env, fs,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::Duration,
};

use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::{Value, json};
use tempfile::TempDir;

/// The longest time that a step may take.
const PATIENCE: Duration = Duration::from_secs(120);

const NAMES: [&str; 4] = ["chromium", "chromium-browser", "google-chrome-stable", "google-chrome"];

/// A browser with one page.
pub(crate) struct Browser {
    process: Child,
    input: ChildStdin,
    messages: Receiver<Value>,
    /// The events that the page reported since the last call of [`requests_and_errors`](Self::requests_and_errors).
    events: Vec<Value>,
    session: Option<String>,
    calls: u64,
    /// The folder is removed after the browser has ended.
    _profile: TempDir,
}

impl Browser {
    pub(crate) fn start() -> Self {
        let program = program().unwrap_or_else(|| {
            panic!("these tests need Chromium, and PATH has none of {NAMES:?}: for example `apt-get install chromium`")
        });
        let profile = tempfile::tempdir().expect("a temporary folder");
        // Chromium reads from descriptor 3 and writes to 4.
        let mut command = Command::new("sh");
        command.args(["-c", r#"exec "$@" 3<&0 4>&1 >/dev/null"#, "sh"]).arg(program);
        command.args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]);
        command.args(["--disable-background-networking", "--disable-component-update", "--disable-sync"]);
        command.args(["--hide-scrollbars", "--remote-debugging-pipe"]);
        command.arg(format!("--user-data-dir={}", profile.path().display())).arg("about:blank");
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("Chromium can be started");
        let input = process.stdin.take().expect("it is piped");
        let mut output = BufReader::new(process.stdout.take().expect("it is piped"));
        let (to, messages) = channel();
        thread::spawn(move || {
            let mut message = Vec::new();
            while output.read_until(0, &mut message).is_ok_and(|length| length > 0) {
                message.pop();
                let value = serde_json::from_slice(&message).expect("Chromium writes JSON");
                if to.send(value).is_err() {
                    break;
                }
                message.clear();
            }
        });
        let mut browser =
            Self { process, input, messages, events: Vec::new(), session: None, calls: 0, _profile: profile };
        let target = browser.call("Target.createTarget", &json!({ "url": "about:blank" }));
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let attached = browser.call("Target.attachToTarget", &attach);
        browser.session = attached["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), &json!({}));
        }
        browser.size(1280, 900);
        browser
    }

    #[track_caller]
    pub(crate) fn call(&mut self, method: &str, parameters: &Value) -> Value {
        self.calls += 1;
        let id = self.calls;
        let mut message = json!({ "id": id, "method": method, "params": parameters });
        if let Some(session) = &self.session {
            message["sessionId"] = session.as_str().into();
        }
        write!(self.input, "{message}\0").and_then(|()| self.input.flush()).expect("Chromium reads");
        loop {
            let mut answer = self.next(method);
            if answer["id"] == id {
                assert!(answer["error"].is_null(), "{method} {parameters}: {}", answer["error"]);
                return answer["result"].take();
            }
            self.events.push(answer);
        }
    }

    #[track_caller]
    fn next(&mut self, what: &str) -> Value {
        self.messages.recv_timeout(PATIENCE).unwrap_or_else(|error| panic!("{what}: Chromium does not answer: {error}"))
    }

    pub(crate) fn size(&mut self, width: u32, height: u32) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.call("Emulation.setDeviceMetricsOverride", &size);
    }

    pub(crate) fn is_dark(&mut self, is_dark: bool) {
        let scheme = json!({ "name": "prefers-color-scheme", "value": if is_dark { "dark" } else { "light" } });
        self.call("Emulation.setEmulatedMedia", &json!({ "features": [scheme] }));
    }

    /// Opens a file, and waits until it is drawn.
    #[track_caller]
    pub(crate) fn open(&mut self, file: &Path) {
        let url = format!("file://{}", file.display());
        let opened = self.call("Page.navigate", &json!({ "url": url }));
        assert!(opened["errorText"].is_null(), "{url}: {opened}");
        self.wait_for("document.readyState === 'complete' && document.body.getAttribute('aria-busy') === 'false'");
        self.drawn();
    }

    /// Waits until the page has drawn everything.
    #[track_caller]
    pub(crate) fn drawn(&mut self) {
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))");
    }

    /// Returns the value of an expression, or of its promise.
    #[track_caller]
    pub(crate) fn evaluate(&mut self, expression: &str) -> Value {
        let parameters = json!({ "expression": expression, "awaitPromise": true, "returnByValue": true });
        let mut result = self.call("Runtime.evaluate", &parameters);
        assert!(result["exceptionDetails"].is_null(), "{expression}: {}", result["exceptionDetails"]);
        result["result"]["value"].take()
    }

    #[track_caller]
    pub(crate) fn number(&mut self, expression: &str) -> f64 {
        let value = self.evaluate(expression);
        value.as_f64().unwrap_or_else(|| panic!("{expression} is {value}"))
    }

    /// Returns the text of the first element that a selector finds.
    #[track_caller]
    pub(crate) fn text(&mut self, selector: &str) -> String {
        let text = self.evaluate(&format!("document.querySelector({selector:?}).innerText"));
        text.as_str().unwrap_or_else(|| panic!("{selector} has no text: {text}")).to_owned()
    }

    #[track_caller]
    pub(crate) fn wait_for(&mut self, condition: &str) {
        let milliseconds = PATIENCE.as_millis();
        let is_met = self.evaluate(&format!(
            "new Promise((done) => {{
                const began = performance.now();
                const look = () => {{
                    if ({condition}) done(true);
                    else if (performance.now() - began > {milliseconds} / 2) done(false);
                    else setTimeout(look, 10);
                }};
                look();
            }})"
        ));
        assert_eq!(is_met, true, "{condition}");
    }

    /// Scrolls to an element. Returns its position in the window: left, top, width, height.
    #[track_caller]
    pub(crate) fn place(&mut self, selector: &str) -> [f64; 4] {
        let script = format!(
            "(() => {{
                const element = document.querySelector({selector:?});
                element.scrollIntoView({{ block: 'center' }});
                const {{ left, top, width, height }} = element.getBoundingClientRect();
                return [left, top, width, height];
            }})()"
        );
        let place = self.evaluate(&script);
        serde_json::from_value(place).expect("an element has a place")
    }

    /// Moves the mouse to this position.
    pub(crate) fn hover(&mut self, at: [f64; 2]) {
        self.mouse("mouseMoved", at, json!({}));
    }

    pub(crate) fn click(&mut self, at: [f64; 2]) {
        self.hover(at);
        for kind in ["mousePressed", "mouseReleased"] {
            self.mouse(kind, at, json!({ "button": "left", "buttons": 1, "clickCount": 1 }));
        }
        self.drawn();
    }

    fn mouse(&mut self, kind: &str, [x, y]: [f64; 2], mut event: Value) {
        (event["type"], event["x"], event["y"]) = (kind.into(), x.into(), y.into());
        self.call("Input.dispatchMouseEvent", &event);
    }

    /// Writes a picture of the whole page to `target/browser`.
    pub(crate) fn picture(&mut self, name: &str) {
        let parameters = json!({ "format": "png", "captureBeyondViewport": true });
        let picture = self.call("Page.captureScreenshot", &parameters);
        let picture = STANDARD.decode(picture["data"].as_str().expect("it is text")).expect("it is in base 64");
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("browser");
        fs::create_dir_all(&folder).expect("the folder of pictures can be made");
        fs::write(folder.join(name).with_extension("png"), picture).expect("the picture can be written");
    }

    /// Returns the requests and the errors of the page since the last call.
    pub(crate) fn requests_and_errors(&mut self) -> (Vec<String>, Vec<Value>) {
        let (mut requests, mut errors) = (Vec::new(), Vec::new());
        for event in self.events.drain(..) {
            match event["method"].as_str() {
                Some("Network.requestWillBeSent") => {
                    requests.push(event["params"]["request"]["url"].as_str().unwrap_or_default().to_owned());
                }
                Some("Runtime.exceptionThrown" | "Runtime.consoleAPICalled" | "Log.entryAdded") => errors.push(event),
                _ => {}
            }
        }
        (requests, errors)
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The processes of Chromium write to the profile until it has ended. If a test failed because Chromium does not answer,
        // there is no answer to wait for.
        _ = write!(self.input, "{}\0", json!({ "id": 0, "method": "Browser.close" })).and_then(|()| self.input.flush());
        while self.messages.recv_timeout(Duration::from_secs(5)).is_ok() {}
        _ = self.process.kill();
        _ = self.process.wait();
    }
}

fn program() -> Option<PathBuf> {
    let folders = env::var_os("PATH")?;
    NAMES.iter().find_map(|name| env::split_paths(&folders).map(|folder| folder.join(name)).find(|file| file.is_file()))
}
