//! The live table on a terminal.

use std::time::Duration;

use anyhow::Result;
use ratatui::crossterm::event::{self, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Borders, Cell, Paragraph, Row as Cells, Table, Wrap};
use ratatui::{DefaultTerminal, Frame};
use tokio_util::sync::CancellationToken;

use super::rows::{Row, Rows};

/// The interval at which keys are read, and the table is drawn again.
const TICK: Duration = Duration::from_millis(200);

/// Shows the table until `stop`, which q and Ctrl-C cancel. Blocks.
pub fn show(rows: &Rows, hints: &[String], stop: &CancellationToken) -> Result<()> {
    let mut terminal = ratatui::init();
    let result = draw_until(&mut terminal, rows, hints, stop);
    ratatui::restore();
    result
}

fn draw_until(terminal: &mut DefaultTerminal, rows: &Rows, hints: &[String], stop: &CancellationToken) -> Result<()> {
    while !stop.is_cancelled() {
        let all = rows.all();
        terminal.draw(|frame| draw(frame, &all, hints))?;
        if !event::poll(TICK)? {
            continue;
        }
        if let event::Event::Key(key) = event::read()?
            && key.kind == KeyEventKind::Press
        {
            // In raw mode the terminal sends no signal.
            let interrupt = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
            if interrupt || key.code == KeyCode::Char('q') {
                stop.cancel();
            }
        }
    }
    Ok(())
}

fn draw(frame: &mut Frame<'_>, rows: &[Row], hints: &[String]) {
    let width = usize::from(frame.area().width).max(1);
    let height: usize = hints.iter().map(|hint| hint.len().div_ceil(width)).sum();
    let header = u16::try_from(height).unwrap_or_default() + 2;
    let [top, table] = Layout::vertical([Constraint::Length(header), Constraint::Fill(1)]).areas(frame.area());
    let lines: Vec<Line<'_>> = hints.iter().map(|hint| Line::raw(hint.as_str())).collect();
    let title = " capstan up: q or Ctrl-C stops everything; in another terminal try ";
    // No borders at the sides: lines are there to be copied.
    let block = Block::new().borders(Borders::TOP | Borders::BOTTOM).title(title);
    frame.render_widget(Paragraph::new(lines).wrap(Wrap { trim: false }).block(block), top);

    let ready = rows.iter().filter(|row| row.ready).count();
    let cells = rows.iter().map(|row| {
        let color = if row.ready { Color::Green } else { Color::Yellow };
        let state = Cell::from(row.state.as_str()).style(Style::new().fg(color));
        let [kind, namespace, name] = [row.kind, &row.namespace, &row.name].map(Cell::from);
        Cells::new([kind, namespace, name, state, Cell::from(row.detail.as_str())])
    });
    let columns = ["KIND", "NAMESPACE", "NAME", "STATE", "NODE OR PROBLEM"];
    let widest = |column: usize, text: fn(&Row) -> &str| {
        let longest = rows.iter().map(|row| text(row).len()).max().unwrap_or_default();
        Constraint::Length(u16::try_from(longest.max(columns[column].len())).unwrap_or(u16::MAX))
    };
    let widths = [
        widest(0, |row| row.kind),
        widest(1, |row| &row.namespace),
        widest(2, |row| &row.name),
        widest(3, |row| &row.state),
        Constraint::Fill(1),
    ];
    let names = Cells::new(columns);
    let table_widget = Table::new(cells, widths)
        .header(names.style(Style::new().add_modifier(Modifier::BOLD)))
        .block(Block::bordered().title(format!(" machines: {ready} of {} ready ", rows.len())));
    frame.render_widget(table_widget, table);
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    #[test]
    fn the_table_shows_every_machine_and_how_many_are_ready() {
        let row = |name: &str, ready| Row {
            owners: Vec::new(),
            kind: "Machine",
            namespace: "openshift-machine-api".into(),
            name: name.into(),
            state: if ready { "Running" } else { "Provisioning" }.into(),
            ready,
            detail: String::new(),
            problem: String::new(),
        };
        let mut terminal = Terminal::new(TestBackend::new(110, 12)).unwrap();
        let hints = ["export KUBECONFIG=/tmp/kubeconfig".to_owned()];
        terminal
            .draw(|frame| draw(frame, &[row("worker-a", true), row("worker-b", false)], &hints))
            .unwrap();
        let screen = terminal.backend().to_string();
        for expected in [
            "export KUBECONFIG",
            "1 of 2 ready",
            "worker-a",
            "Running",
            "worker-b",
            "Provisioning",
        ] {
            assert!(screen.contains(expected), "{expected} is not on the screen:\n{screen}");
        }
    }
}
