//! A control group with little memory, for a process that must live within it.

use std::path::PathBuf;
use std::process::Command;

/// A group of its own below the one that the tests run in, until it is dropped.
pub struct Group {
    dir: PathBuf,
}

impl Group {
    /// At most `limit` bytes, no swap among them. Errors: why this machine has no such group.
    pub fn new(limit: u64) -> Result<Self, String> {
        let own = std::fs::read_to_string("/proc/self/cgroup").map_err(|e| e.to_string())?;
        let line = |controllers: &str| {
            own.lines().find_map(|line| line.split_once(':')?.1.strip_prefix(controllers)).map(String::from)
        };
        let version_1 = line("memory:").map(|path| (format!("/sys/fs/cgroup/memory{path}"), "memory.limit_in_bytes"));
        let version_2 = line(":").map(|path| (format!("/sys/fs/cgroup{path}"), "memory.max"));
        let (parent, file) = version_1.or(version_2).ok_or("this process is in no control group")?;
        let group = Self { dir: PathBuf::from(parent).join(format!("moebius-test-{}", std::process::id())) };
        std::fs::create_dir(&group.dir).map_err(|e| format!("{}: {e}", group.dir.display()))?;
        std::fs::write(group.dir.join(file), limit.to_string()).map_err(|e| format!("{file} cannot be set: {e}"))?;
        let _ = std::fs::write(group.dir.join("memory.swap.max"), "0"); // version 1 has none by this name
        // In version 2 a group with processes may have no groups that limit.
        let joined = group.within(&Command::new("true")).status().map_err(|e| e.to_string())?;
        if joined.success() { Ok(group) } else { Err("a process cannot be put into the group".into()) }
    }

    /// The same command, in the group.
    pub fn within(&self, command: &Command) -> Command {
        let mut inside = Command::new("sh");
        inside
            .args(["-c", "echo $$ > \"$0\"/cgroup.procs && exec \"$@\""])
            .arg(&self.dir)
            .arg(command.get_program())
            .args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => inside.env(name, value),
                None => inside.env_remove(name),
            };
        }
        inside
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A process that was killed just now may still be in it.
        for _ in 0..50 {
            if std::fs::remove_dir(&self.dir).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}
