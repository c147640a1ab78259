// Opens the folded stacks of `gpumem report --format folded` in speedscope, in headless Chromium. It is run by hand:
//
//     $ apt-get install chromium && npm install speedscope
//     $ node crates/cli/tests/proof/speedscope.js target/debug/gpumem train.capture node_modules/speedscope FOLDER
//
// FOLDER gets a picture of the page.
'use strict';

const { execFileSync, spawn } = require('child_process');
const fs = require('fs');
const path = require('path');

const [command, recording, speedscope, folder] = process.argv.slice(2);

async function main() {
  fs.mkdirSync(folder, { recursive: true });
  const profile = fs.mkdtempSync(path.join(folder, 'profile-'));
  const chromium = spawn('chromium', [
    '--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
    '--disable-component-update', '--disable-sync', `--user-data-dir=${profile}`, '--remote-debugging-pipe', 'about:blank',
  ], { stdio: ['ignore', 'ignore', 'ignore', 'pipe', 'pipe'] });
  const answers = new Map();
  let text = '';
  let session;
  chromium.stdio[4].on('data', (data) => {
    text += data;
    for (let end; (end = text.indexOf('\0')) >= 0; text = text.slice(end + 1)) {
      const { id, result, error } = JSON.parse(text.slice(0, end));
      answers.get(id)?.(error ? Promise.reject(new Error(error.message)) : result);
    }
  });
  const call = (method, params = {}) => new Promise((done) => {
    const id = answers.size + 1;
    answers.set(id, done);
    chromium.stdio[3].write(`${JSON.stringify({ id, method, params, sessionId: session })}\0`);
  });
  const evaluate = async (expression) =>
    (await call('Runtime.evaluate', { expression, awaitPromise: true, returnByValue: true })).result.value;
  const waitFor = async (words) => {
    for (let tries = 0; tries < 100; tries++) {
      const shown = await evaluate('document.body ? document.body.innerText : ""');
      if (words.every((word) => shown.includes(word))) return;
      await new Promise((done) => setTimeout(done, 100));
    }
    throw new Error(`${words} are not in ${await evaluate('document.body.innerText')}`);
  };

  const { targetId } = await call('Target.createTarget', { url: 'about:blank' });
  session = (await call('Target.attachToTarget', { targetId, flatten: true })).sessionId;
  await call('Page.enable');
  await call('Emulation.setDeviceMetricsOverride', { width: 1280, height: 900, deviceScaleFactor: 1, mobile: false });

  const stacks = path.resolve(folder, 'train.folded');
  execFileSync(command, ['report', '--format', 'folded', '--output', stacks, recording]);
  // The page is opened as the command `speedscope` opens a file.
  const base64 = fs.readFileSync(stacks).toString('base64');
  const script = path.resolve(folder, 'speedscope.js');
  fs.writeFileSync(script, `speedscope.loadFileFromBase64('train.folded', '${base64}')`);
  await call('Page.navigate', { url: `file://${path.resolve(speedscope)}/dist/release/index.html#localProfilePath=${script}` });
  await waitFor(['Time Order', 'Left Heavy', 'Sandwich']);
  const { data } = await call('Page.captureScreenshot', { format: 'png' });
  fs.writeFileSync(path.join(folder, 'speedscope.png'), Buffer.from(data, 'base64'));
  console.log(`speedscope: ${(await evaluate('document.body.innerText')).replace(/\s+/g, ' ').slice(0, 200)}`);

  chromium.on('exit', () => fs.rmSync(profile, { recursive: true, force: true, maxRetries: 5 }));
  session = undefined;
  call('Browser.close');
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
