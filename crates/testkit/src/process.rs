//! Processes that end with the process that they were started for.
//!
//! Each program runs under a small shell guard that reads from a pipe, the lifeline. The process that holds the other
//! end keeps the program alive. When that process ends in any way, SIGKILL included, the pipe closes and the guard
//! kills the program. No cleanup depends on code that may not run, and no parent thread matters, as it would with a
//! parent-death signal.

use std::fs::{self, File};
use std::io::{PipeReader, PipeWriter};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::files;

/// `$0` is the file for the program's process id, `$@` the program. Descriptor 3 is the lifeline.
const GUARD: &str = r#"
exec 3<&0 </dev/null
"$@" 3<&- &
program=$!
echo "$program" >"$0"
{ read -r _ <&3; kill -KILL "$program"; } 2>/dev/null &
watcher=$!
exec 3<&-
wait "$program"
code=$?
kill "$watcher" 2>/dev/null
exit "$code"
"#;

/// Holds the lifeline on stdout while process `$1` lives; an unreaped process counts as dead. Then it closes the
/// lifeline, and removes the folder `$2`, which is of no use without the programs.
const KEEPER: &str = r#"
while kill -0 "$1" 2>/dev/null; do
  if [ -r "/proc/$1/stat" ] && read -r stat <"/proc/$1/stat"; then
    case $stat in *") Z "*) break ;; esac
  fi
  sleep 0.3
done
exec >&-
sleep 1
rm -rf "$2"
"#;

/// Keeps programs alive.
pub struct Lifeline {
    reader: PipeReader,
    /// `None` when a keeper process holds it.
    writer: Option<PipeWriter>,
}

impl Lifeline {
    /// Programs live until this value is dropped or this process ends.
    pub fn own() -> Result<Self> {
        let (reader, writer) = std::io::pipe().context("cannot make a pipe")?;
        Ok(Self {
            reader,
            writer: Some(writer),
        })
    }

    /// Programs live as long as process `pid`, even after the end of this one. The folder `doomed` is removed with
    /// them.
    pub fn of_process(pid: u32, doomed: &Path) -> Result<Self> {
        let (reader, writer) = std::io::pipe().context("cannot make a pipe")?;
        Command::new("/bin/sh")
            .args(["-c", KEEPER, "capstan-keeper", &pid.to_string()])
            .arg(doomed)
            .stdin(Stdio::null())
            .stdout(writer)
            .stderr(Stdio::null())
            .process_group(0)
            .current_dir("/")
            .spawn()
            .context("cannot start the keeper")?;
        Ok(Self { reader, writer: None })
    }

    /// Starts a program with its output in `DIR/NAME.log`.
    pub fn start(&self, dir: &Path, name: &str, program: Command) -> Result<Process> {
        let log = dir.join(format!("{name}.log"));
        let out = File::options().create(true).append(true).open(&log);
        let out = out.with_context(|| format!("cannot write {}", log.display()))?;
        let pid_file = dir.join(format!("{name}.pid"));
        let mut guard = self.guard(&program, &pid_file)?;
        guard
            .stdout(out.try_clone().context("cannot share the log")?)
            .stderr(out)
            .current_dir(dir);
        let guard = guard.spawn().with_context(|| format!("cannot start {name}"))?;
        Ok(Process {
            name: name.to_owned(),
            guard,
            log,
            pid_file,
        })
    }

    /// Returns the program under its guard, in its own folder. The caller sets its output.
    pub(crate) fn guard(&self, program: &Command, pid_file: &Path) -> Result<Command> {
        let mut guard = Command::new("/bin/sh");
        guard
            .args(["-c", GUARD])
            .arg(pid_file)
            .arg(program.get_program())
            .args(program.get_args());
        for (key, value) in program.get_envs() {
            match value {
                Some(value) => guard.env(key, value),
                None => guard.env_remove(key),
            };
        }
        if let Some(dir) = program.get_current_dir() {
            guard.current_dir(dir);
        }
        guard
            .stdin(self.reader.try_clone().context("cannot share the lifeline")?)
            // Ctrl-C on the terminal is for the one who started us, who then ends the programs in order.
            .process_group(0);
        Ok(guard)
    }

    /// Lets go: every program that hangs on it is killed.
    pub fn cut(&mut self) {
        self.writer = None;
    }
}

/// One running program.
pub struct Process {
    name: String,
    guard: Child,
    log: PathBuf,
    pid_file: PathBuf,
}

impl Process {
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Fails with the end of the log when the program has ended.
    pub fn check(&mut self) -> Result<()> {
        match self.guard.try_wait()? {
            None => Ok(()),
            Some(status) => bail!(
                "{} ended with {status}; the end of {}:\n{}",
                self.name,
                self.log.display(),
                files::tail(&self.log, 15)
            ),
        }
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        let text = fs::read_to_string(&self.pid_file).with_context(|| format!("{} has no pid yet", self.name))?;
        let pid = text.trim().parse().ok().and_then(Pid::from_raw);
        let pid = pid.with_context(|| format!("{} holds no process id", self.pid_file.display()))?;
        kill_process(pid, signal).with_context(|| format!("cannot signal {}", self.name))
    }

    /// Stops the program without ending it: connections stay open, nothing is answered.
    pub fn pause(&self) -> Result<()> {
        self.signal(Signal::STOP)
    }

    pub fn resume(&self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    /// Leaves it to its lifeline.
    pub fn detach(self) {
        std::mem::forget(self);
    }

    /// Ends it now and waits for its end.
    pub fn kill(&mut self) {
        if let Ok(None) = self.guard.try_wait()
            && let Some(group) = Pid::from_raw(self.guard.id() as i32)
        {
            // An error means that it ended meanwhile.
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.guard.wait();
        let _ = fs::remove_file(&self.pid_file);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}
